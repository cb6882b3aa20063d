"""``python -m bench.gpu_check``: the exactness conditions on a GPU, as one table. Without a GPU it says so.

Needs torch (from 2.11), transformers (from 5.17) and numpy only. Runs the model given by ``--model`` (a folder of
safetensors), else the default model if it is cached already, else a random model of the same shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from bench.offline import Completion, OfflineConfig, run_offline
from model.loader import LoadedModel, load_model
from model.source import cached_default_model
from specdec.params import SamplingParams

Request = tuple[list[int], SamplingParams]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    name: str
    config: OfflineConfig
    batch: int = 8


REFERENCE = Check("alone, no speculation", OfflineConfig(num_speculative_tokens=0, prefix_cache=False), batch=1)
CHECKS = (
    Check("batch 8", OfflineConfig(num_speculative_tokens=0)),
    Check("batch 16, chunks of 33", OfflineConfig(num_speculative_tokens=0, max_num_batched_tokens=33), batch=16),
    Check("block size 1", OfflineConfig(num_speculative_tokens=0, block_size=1)),
    Check("block size 64, n-gram k = 4", OfflineConfig(num_speculative_tokens=4, block_size=64)),
    Check("n-gram k = 4", OfflineConfig(num_speculative_tokens=4)),
    Check("random drafts k = 8", OfflineConfig(num_speculative_tokens=8, drafter="random")),
    Check("random drafts k = 8, blocks of 4", OfflineConfig(num_speculative_tokens=8, drafter="random", block_size=4)),
)


def random_model(folder: Path, *, layers: int, hidden: int, vocab_size: int = 49152) -> Path:
    """Save a random Llama of SmolLM2's proportions, without a tokenizer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_requests(vocab_size: int, tokens: int, count: int) -> list[Request]:
    """Random prompts of 1 to 300 ids, half greedy, half sampled at temperature 1, with logprobs."""
    rng = np.random.default_rng(7)
    return [
        (
            rng.integers(0, vocab_size, size=int(rng.integers(1, 300))).tolist(),
            SamplingParams(seed=i, max_tokens=tokens, temperature=float(i % 2), logprobs=2),
        )
        for i in range(count)
    ]


def compare(expected: list[Completion], got: list[Completion]) -> tuple[int, int, int, float]:
    """(requests with equal ids, positions compared, positions with equal ids and logprobs, worst logprob gap)."""
    same = positions = exact = 0
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        same += a.token_ids == b.token_ids
        for token_a, token_b, p, q in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=False):
            if token_a != token_b:
                break
            worst = max(worst, abs(p.logprob - q.logprob))
            exact += p == q
        positions += max(len(a.token_ids), len(b.token_ids))
    return same, positions, exact, worst


def run_checks(model: LoadedModel, label: str, tokens: int, count: int) -> bool:
    """Print one table for ``model``; True if every answer was identical under every condition."""
    requests = make_requests(model.info.vocab_size, tokens, count)
    info = model.info
    print(f"\n### {label}: {model.executor.kind}, {info.dtype}, {info.device}; level at load {model.exactness.level}\n")
    print("| condition | equal ids (requests) | equal ids and logprobs (positions) | worst logprob gap | seconds |")
    print("|---|---|---|---|---|")
    started = time.perf_counter()
    expected = run_offline(model.executor, REFERENCE.config, requests, batch=REFERENCE.batch)
    print(f"| {REFERENCE.name} (reference) | | | | {time.perf_counter() - started:.1f} |", flush=True)
    everything = True
    for check in CHECKS:
        started = time.perf_counter()
        got = run_offline(model.executor, check.config, requests, batch=check.batch)
        same, positions, exact, worst = compare(expected, got)
        everything &= got == expected
        seconds = time.perf_counter() - started
        print(
            f"| {check.name} | {same} of {count} | {exact} of {positions} | {worst:.2g} | {seconds:.1f} |", flush=True
        )
    return everything


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder of safetensors")
    parser.add_argument("--random", action="store_true", help="a random model even if the default one is cached")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the check itself")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--layers", type=int, default=30, help="layers of the random model")
    parser.add_argument("--hidden", type=int, default=576, help="hidden size of the random model")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--executors", nargs="+", default=["fused", "generic"])
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no CUDA device here; nothing was checked")
        return 0
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    python = sys.version.split()[0]
    print(f"GPU check on {where}: torch {torch.__version__}, transformers {transformers.__version__}, Python {python}")
    everything = True
    with tempfile.TemporaryDirectory() as temporary:
        path = args.model or (None if args.random else cached_default_model())
        name = path.name if path else "random Llama"
        path = path or random_model(Path(temporary), layers=args.layers, hidden=args.hidden)
        for dtype in args.dtypes:
            for executor in args.executors:
                model = load_model(path, dtype=dtype, device=args.device, executor=executor)
                everything &= run_checks(model, name, args.tokens, args.requests)
                del model
    print(
        "\nevery answer identical under every condition" if everything else "\nNOT identical everywhere: see the tables"
    )
    return 0 if everything else 1


if __name__ == "__main__":
    raise SystemExit(main())
