"""Tiny random models that take every path: generic and fused, bf16 and fp32, sliding windows, biases, q/k norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from model.kernels import KernelsChoice
from model.loader import DTypeName, ExecutorName, LoadedModel, load_model

VOCAB = 211  # odd on purpose: no width is a multiple of a vector


@dataclass(frozen=True, slots=True)
class TinyModel:
    config: Callable[[], PretrainedConfig]
    dtype: DTypeName = "bfloat16"
    executor: ExecutorName = "auto"
    kernels: bool = True  # False: the torch path, as on a machine that cannot run the compiled kernels
    prepare: Callable[[PreTrainedModel], None] | None = None  # changes the random weights before they are saved

    def prompts(self) -> list[list[int]]:
        """16 prompts of 1 to 150 ids, half of them with repetitions that an n-gram drafter finds."""
        rng = np.random.default_rng(3)
        prompts = []
        for i, length in enumerate((1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 90, 129, 150)):
            ids = rng.integers(0, VOCAB, size=length).tolist()
            prompts.append((ids[:5] * 40)[:length] if i % 2 else ids)
        return prompts


def _common(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "initializer_range": 0.2,  # wide logits: a greedy choice is not a coin toss between neighbours
        **changes,
    }


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**_common())


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**_common(sliding_window=21))


def _qwen2() -> PretrainedConfig:
    return transformers.Qwen2Config(**_common(tie_word_embeddings=True))


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**_common())


def _gemma2() -> PretrainedConfig:
    return transformers.Gemma2Config(**_common(sliding_window=19, num_hidden_layers=2, query_pre_attn_scalar=16))


TINY_MODELS = {
    "llama generic bf16": TinyModel(_llama, executor="generic"),
    "llama fused on torch bf16": TinyModel(_llama, executor="fused", kernels=False),
    "gemma2 generic fp32": TinyModel(_gemma2, dtype="float32", executor="generic"),
    "mistral bf16": TinyModel(_mistral),
    "qwen2 bf16": TinyModel(_qwen2),
    "qwen3 fp32": TinyModel(_qwen3, dtype="float32"),
}


def load_tiny(tiny: TinyModel, folder: Path) -> LoadedModel:
    """A random checkpoint of ``tiny``, saved in ``folder``, on its executor."""
    kernels: KernelsChoice | None = None if tiny.kernels else "torch"
    model = load_model(_save_tiny(tiny, folder), dtype=tiny.dtype, executor=tiny.executor, kernels=kernels)
    if not tiny.kernels:
        assert model.executor.kind == "fused/torch", model.executor.kind
    return model


def _save_tiny(tiny: TinyModel, folder: Path) -> Path:
    """Save a random checkpoint of ``tiny`` into ``folder``."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(tiny.config())
    if tiny.prepare is not None:
        with torch.no_grad():
            tiny.prepare(model)
    model.to(torch.bfloat16 if tiny.dtype == "bfloat16" else torch.float32).save_pretrained(folder)
    return folder
