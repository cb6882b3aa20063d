"""A Llama-shaped decoder's weights by their names in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import ModelError
from model.fused_spec import FusedSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Products ``[out, in]`` in the model's dtype, norms and biases ``[n]`` in any; None: the model has none."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model; the tensors are borrowed."""

    embedding: Tensor  # [embedding_rows, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor  # [vocab, hidden]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def collect_weights(spec: FusedSpec, state: Mapping[str, Tensor]) -> DecoderWeights:
    """Find ``spec``'s weights in ``state``. Raises ModelError for one that is missing or has another shape."""
    finder = _Finder(state)
    hidden, inter = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layers = []
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        layers.append(
            LayerWeights(
                attention_norm=finder.get(f"{layer}.input_layernorm.weight", hidden),
                q=finder.get(f"{attention}.q_proj.weight", q_rows, hidden),
                k=finder.get(f"{attention}.k_proj.weight", kv_rows, hidden),
                v=finder.get(f"{attention}.v_proj.weight", kv_rows, hidden),
                q_bias=finder.get_if(spec.qkv_bias, f"{attention}.q_proj.bias", q_rows),
                k_bias=finder.get_if(spec.qkv_bias, f"{attention}.k_proj.bias", kv_rows),
                v_bias=finder.get_if(spec.qkv_bias, f"{attention}.v_proj.bias", kv_rows),
                q_norm=finder.get_if(spec.qk_norm, f"{attention}.q_norm.weight", spec.head_dim),
                k_norm=finder.get_if(spec.qk_norm, f"{attention}.k_norm.weight", spec.head_dim),
                out=finder.get(f"{attention}.o_proj.weight", hidden, q_rows),
                out_bias=finder.get_if(spec.out_bias, f"{attention}.o_proj.bias", hidden),
                mlp_norm=finder.get(f"{layer}.post_attention_layernorm.weight", hidden),
                gate=finder.get(f"{mlp}.gate_proj.weight", inter, hidden),
                up=finder.get(f"{mlp}.up_proj.weight", inter, hidden),
                down=finder.get(f"{mlp}.down_proj.weight", hidden, inter),
                gate_bias=finder.get_if(spec.mlp_bias, f"{mlp}.gate_proj.bias", inter),
                up_bias=finder.get_if(spec.mlp_bias, f"{mlp}.up_proj.bias", inter),
                down_bias=finder.get_if(spec.mlp_bias, f"{mlp}.down_proj.bias", hidden),
            )
        )
    embedding = finder.get("model.embed_tokens.weight", spec.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=finder.get("model.norm.weight", hidden),
        head=embedding if spec.tied_head else finder.get("lm_head.weight", spec.vocab_size, hidden),
    )


class _Finder:
    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def get(self, name: str, *shape: int) -> Tensor:
        found = self._state.get(name)
        if found is None:
            raise ModelError(f"the checkpoint holds no {name}")
        if tuple(found.shape) != shape:
            raise ModelError(f"{name} has shape {tuple(found.shape)}, the config says {shape}")
        return found.detach()

    def get_if(self, wanted: bool, name: str, *shape: int) -> Tensor | None:
        return self.get(name, *shape) if wanted else None
