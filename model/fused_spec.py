"""The declarative description of a Llama-shaped decoder: all that the fused executor knows of a model.

::

    x = embed(ids)
    for layer:  x += out(attention(rope(norm(q)), rope(norm(k)), v of qkv(norm(x))))     norms of q and k: qwen3
                x += down(silu(gate(norm(x))) * up(norm(x)))
    logits = head(norm(x))
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# model type -> prefix of its classes in transformers
_FAMILY = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies that depend on no batch mate


class UnsupportedModel(ValueError):
    """The config describes something that the fused executor does not compute. The message says what."""


@dataclass(frozen=True, slots=True)
class FusedSpec:
    """Shapes and switches of one model; immutable, no weights in it."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # per layer: positions that a row sees, its own included; 0: all
    inv_freq: tuple[float, ...]  # [head_dim / 2], float32 values
    rope_scale: float  # factor on cosine and sine

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def num_weights(self) -> int:
        """Elements of all products' weights, the head's included."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size)
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @classmethod
    def from_config(cls, config: Any) -> FusedSpec:
        """Raises UnsupportedModel for anything that this description does not cover."""
        kind = str(config.model_type)
        if kind not in _FAMILY:
            raise UnsupportedModel(f"model type {kind!r} (known: {', '.join(_FAMILY)})")
        if config.hidden_act != "silu":
            raise UnsupportedModel(f"activation {config.hidden_act!r}")
        if getattr(config, "quantization_config", None):
            raise UnsupportedModel("quantised weights")
        heads = int(config.num_attention_heads)
        kv_heads = int(config.num_key_value_heads or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        if heads % kv_heads or head_dim % 2:
            raise UnsupportedModel(f"{heads} heads of size {head_dim} over {kv_heads} KV heads")
        inv_freq, rope_scale = _rope(config, kind)
        if 2 * len(inv_freq) != head_dim:
            raise UnsupportedModel(f"rope over {2 * len(inv_freq)} of {head_dim} dimensions")
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            model_type=kind,
            num_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=int(config.vocab_size),
            max_positions=int(config.max_position_embeddings),
            eps=float(config.rms_norm_eps),
            tied_head=bool(config.tie_word_embeddings),
            qkv_bias=kind == "qwen2" or (bias and kind != "mistral"),
            out_bias=bias and kind in ("llama", "qwen3"),
            mlp_bias=kind == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=kind == "qwen3",
            windows=_windows(config, kind),
            inv_freq=tuple(inv_freq.tolist()),
            rope_scale=rope_scale,
        )


def unsupported_reason(config: Any) -> str | None:
    """Why the fused executor does not take this config; None if it does."""
    try:
        FusedSpec.from_config(config)
    except UnsupportedModel as error:
        return str(error)
    return None


def supports(config: Any) -> bool:
    """True if the fused executor takes this config."""
    return unsupported_reason(config) is None


def _windows(config: Any, kind: str) -> tuple[int, ...]:
    layers = int(config.num_hidden_layers)
    if kind == "llama":
        return (0,) * layers
    window = int(config.sliding_window or 0)
    if kind == "mistral":
        return (window,) * layers
    types = list(config.layer_types)
    others = sorted(set(types) - {"full_attention", "sliding_attention"})
    if others or len(types) != layers:
        raise UnsupportedModel(f"layer types {', '.join(others) or len(types)} in {layers} layers")
    return tuple(window if layer == "sliding_attention" else 0 for layer in types)


def _rope(config: Any, kind: str) -> tuple[Tensor, float]:
    """Inverse frequencies and factor as transformers' own module computes them: nothing is derived again."""
    parameters = config.rope_parameters or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in _STATIC_ROPE:
        raise UnsupportedModel(f"rope type {rope_type!r}")
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(f"partial rotary factor {parameters['partial_rotary_factor']}")
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with torch.device("cpu"):
        rotary = getattr(module, f"{_FAMILY[kind]}RotaryEmbedding")(config)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
