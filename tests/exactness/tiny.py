"""Tiny random models that take every path: generic and fused, bf16 and fp32, sliding windows, biases, q/k norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from bench.tiny_models import save_tiny_model
from model.int8 import Quantize
from model.kernels import KernelsChoice
from model.loader import DTypeName, ExecutorName, LoadedModel, load_model

VOCAB = 211  # odd on purpose: no width is a multiple of a vector


@dataclass(frozen=True, slots=True)
class TinyModel:
    family: str  # of bench.tiny_models
    dtype: DTypeName = "bfloat16"
    executor: ExecutorName = "auto"
    quantize: Quantize = "none"
    kernels: bool = True  # False: the torch path, as on a machine that cannot run the compiled kernels
    prepare: Callable[[PreTrainedModel], None] | None = None  # changes the random weights before they are saved
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the config

    def prompts(self) -> list[list[int]]:
        """16 prompts of 1 to 150 ids, half of them with repetitions that an n-gram drafter finds."""
        rng = np.random.default_rng(3)
        prompts = []
        for i, length in enumerate((1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64, 65, 90, 129, 150)):
            ids = rng.integers(0, VOCAB, size=length).tolist()
            prompts.append((ids[:5] * 40)[:length] if i % 2 else ids)
        return prompts


TINY_MODELS = {
    "llama generic bf16": TinyModel("llama", executor="generic"),
    "llama fused on torch bf16": TinyModel("llama", executor="fused", kernels=False),
    "gemma2 generic fp32": TinyModel(
        "gemma2",
        dtype="float32",
        executor="generic",
        changes={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral bf16": TinyModel("mistral"),
    "qwen2 bf16": TinyModel("qwen2"),
    "qwen3 fp32": TinyModel("qwen3", dtype="float32"),
    "llama int8": TinyModel("llama", quantize="int8"),
}


def load_tiny(tiny: TinyModel, folder: Path) -> LoadedModel:
    """A random checkpoint of ``tiny``, saved in ``folder``, on its executor."""
    kernels: KernelsChoice | None = None if tiny.kernels else "torch"
    save_tiny_model(
        tiny.family,
        folder,
        dtype="float32" if tiny.dtype == "float32" else "bfloat16",
        tokenizer=False,
        prepare=tiny.prepare,
        # Nothing stops an answer, and a context that is not longer than needed keeps the probe at load short.
        vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        **tiny.changes,
    )
    model = load_model(folder, dtype=tiny.dtype, executor=tiny.executor, kernels=kernels, quantize=tiny.quantize)
    if not tiny.kernels:
        assert model.executor.kind == "fused/torch", model.executor.kind
    return model
