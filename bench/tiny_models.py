"""Tiny random models of twelve families, saved as checkpoints with a tokenizer: for proofs, not for talking to.

::

    python -m bench.tiny_models gemma3 /tmp/gemma3     # then: truedraft verify --model /tmp/gemma3
    python -m bench.tiny_models --levels               # the level that each family reaches on this machine

Sizes are odd on purpose (no width of the vocabulary is a multiple of a vector, query heads share KV heads, sliding
windows are shorter than most prompts), and the weights are drawn wide, so that answers differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from model.errors import ModelError
from model.int8 import Quantize
from model.kernels import KernelsChoice, get_kernels
from model.loader import DTypeName, load_model
from specdec.probe import measured_exactness
from specdec.sampling import Sampler

VOCAB = 331  # a prime
CONTEXT = 2048
SPECIAL_TOKENS = ("<|end|>", "<|start|>")
END_ID, START_ID = 0, 1

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": START_ID,
    "eos_token_id": END_ID,
    "pad_token_id": None,
    "initializer_range": 0.2,  # wide logits: a greedy choice is not a coin toss between neighbours
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

# family -> model type of transformers, and what its config needs beyond _COMMON (None: leave the field out)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 21}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": None}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"sliding_window": 19, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 37, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"head_dim": None, "original_max_position_embeddings": CONTEXT}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "granite": ("granite", {"head_dim": None, "attention_multiplier": 0.3, "logits_scaling": 0.7}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 72, "n_positions": CONTEXT}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_key_value_heads": 4,
            "head_dim": None,
        },
    ),
}
FAMILIES = tuple(_FAMILIES)
_DTYPES: dict[str, DTypeName] = {"bfloat16": "bfloat16", "float32": "float32"}


def tiny_config(family: str, **changes: Any) -> Any:
    """The config of ``family`` (a transformers PretrainedConfig) with ``changes``. Raises ValueError for another."""
    from transformers import AutoConfig

    if family not in _FAMILIES:
        raise ValueError(f"unknown family {family!r}: there are {', '.join(FAMILIES)}")
    model_type, extra = _FAMILIES[family]
    fields = {name: value for name, value in {**_COMMON, **extra, **changes}.items() if name != "head_dim" or value}
    return AutoConfig.for_model(model_type, **fields)


def save_tiny_model(
    family: str,
    folder: Path,
    *,
    dtype: str = "bfloat16",
    seed: int = 11,
    tokenizer: bool = True,
    prepare: Callable[[Any], None] | None = None,
    **changes: Any,
) -> Path:
    """Write a random checkpoint of ``family`` into ``folder`` (made if absent) and return it.

    ``dtype`` is bfloat16 or float32; ``changes`` go into the config; ``prepare`` gets the model, without gradients, and
    may change its weights. Needs no network and overwrites what is there.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from model.quiet import quiet_transformers

    config = tiny_config(family, **changes)
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide a mistake in them
                    parameter.add_(0.1 * torch.randn_like(parameter))
                elif "router" in name or "gate.weight" in name:
                    parameter.normal_(0.0, 0.2)
            if prepare is not None:
                prepare(model)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    if tokenizer:
        save_tiny_tokenizer(folder)
    return folder


def save_tiny_tokenizer(folder: Path, *, vocab_size: int = VOCAB) -> None:
    """A byte-level BPE tokenizer of ``vocab_size`` ids, trained on a few lines: it round-trips any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    end, start = SPECIAL_TOKENS
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, bos_token=start).save_pretrained(folder)


_TEXTS = (
    "A drafter proposes tokens, the target verifies them, and what is emitted is the target's own choice.",
    "The rain in the valley fell on the river, on the roofs and on the road that leads to the old mill.",
    "def add(first, second):\n    return first + second\n\nfor index in range(10):\n    print(index, add(index, 1))\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}',
    "今天的天气很好，我们一起去公园散步吧。The weather is good today, so we walk in the park.",
    "1234567890 + 2468 = 3703 * 11; user: hello, who are you? assistant: I am a tiny random model.",
)


@dataclass(frozen=True, slots=True)
class FamilyLevel:
    """What one family reached on this machine, loaded as a server would load it."""

    family: str
    dtype: str
    kernels: KernelsChoice
    executor: str  # kind, e.g. "fused/cpu-avx512bf16"; empty if refused
    level: str  # "L0", "L2" or "refused"
    padding: str
    detail: str


def measure_family(
    family: str,
    dtype: str,
    kernels: KernelsChoice,
    *,
    num_threads: int | None = None,
    budget: int = 512,
    quantize: Quantize = "none",
    **changes: Any,
) -> FamilyLevel:
    """Save ``family`` in a temporary folder, load it and say what it reached with batches of up to ``budget`` rows.

    ``changes`` go into the config. Remembers nothing."""
    with tempfile.TemporaryDirectory(prefix="truedraft-tiny-") as name:
        folder = save_tiny_model(family, Path(name) / family, dtype=dtype, **changes)
        try:
            loaded = load_model(
                folder,
                dtype=_DTYPES[dtype],
                kernels=kernels,
                num_threads=num_threads,
                max_batched_tokens=budget,
                home=Path(name),
                quantize=quantize,
            )
        except ModelError as error:
            return FamilyLevel(family, dtype, kernels, "", "refused", "", str(error))
        report = measured_exactness(loaded, Sampler(get_kernels(choice=kernels)))
        return FamilyLevel(family, dtype, kernels, loaded.executor.kind, report.level, report.padding, report.detail)


def levels_markdown(rows: Sequence[FamilyLevel]) -> str:
    """A table with a line for each family and kernels: executor, level in each dtype, padding, reasons."""
    lines = [
        "| family | kernels | executor | bfloat16 | float32 | padding | reason below L0 |",
        "|---|---|---|---|---|---|---|",
    ]
    grouped: dict[tuple[str, str], dict[str, FamilyLevel]] = {}
    for row in rows:
        grouped.setdefault((row.family, row.kernels), {})[row.dtype] = row
    for (family, kernels), found in grouped.items():
        reasons = _merged({dtype: row.detail if row.level != "L0" else "" for dtype, row in found.items()})
        levels = [found[dtype].level if dtype in found else "" for dtype in _DTYPES]
        executor = _merged({dtype: row.executor for dtype, row in found.items()})
        padding = _merged({dtype: row.padding for dtype, row in found.items()})
        cells = [family, kernels, executor, *levels, padding, reasons]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _merged(by_dtype: Mapping[str, str]) -> str:
    """One text if the dtypes agree, else each with its dtype."""
    texts = {dtype: text for dtype, text in by_dtype.items() if text}
    if len(set(texts.values())) == 1 and len(texts) == len(by_dtype):
        return next(iter(texts.values()))
    return "; ".join(f"{dtype}: {text}" for dtype, text in texts.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tiny_models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family", nargs="?", choices=FAMILIES, help="which family to save")
    parser.add_argument("folder", nargs="?", type=Path, help="where to save it")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="bfloat16", help="of the weights")
    parser.add_argument("--levels", action="store_true", help="measure all families and print a table")
    parser.add_argument("--quantize", choices=get_args(Quantize), default="none", help="with --levels: as for serve")
    parser.add_argument("--threads", type=int, default=None, help="with --levels: threads of the forward")
    arguments = parser.parse_args(argv)
    if arguments.levels:
        rows = []
        for family in FAMILIES:
            for kernels in get_args(KernelsChoice):
                for dtype in _DTYPES:
                    options = {"num_threads": arguments.threads, "quantize": arguments.quantize}
                    rows.append(measure_family(family, dtype, kernels, **options))
                    print(f"{family} {dtype} {kernels}: {rows[-1].level}", file=sys.stderr, flush=True)
        print(levels_markdown(rows), end="")
        return 0
    if arguments.family is None or arguments.folder is None:
        parser.error("give a family and a folder, or --levels")
    print(save_tiny_model(arguments.family, arguments.folder, dtype=arguments.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main())
