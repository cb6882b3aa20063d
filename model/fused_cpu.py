"""The fused decoder on the compiled CPU kernels: one operation a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from model.batch import PackedBatch
from model.fused_rope import RopeTable
from model.fused_spec import FusedSpec
from model.fused_weights import DecoderWeights, LayerWeights
from model.int8 import Int8Weight, Quantize, quantize_weight
from model.interface import ReducedHead
from model.kernels import INSTRUCTION_SET, Kernels
from model.kernels.ops import LAYER_TENSORS, PackedWeight, block_tensors, gated_columns, packed_elements


class CpuStack:
    """Packs the weights once, with ``quantize`` "int8" as int8; ``num_threads`` None follows torch's thread count."""

    mask_seconds = 0.0  # a row's position says what it may see: there is no mask

    def __init__(
        self,
        spec: FusedSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        *,
        num_threads: int | None = None,
        quantize: Quantize = "none",
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._threads = num_threads
        self._rope = RopeTable(spec)
        self._embedding = weights.embedding.contiguous()
        self._final_norm = weights.final_norm.float().contiguous()
        self._int8 = quantize == "int8"
        self._arena = _Arena(kernels, spec, torch.int8 if self._int8 else weights.dtype)
        self._layers: list[Tensor] = []
        for i, layer in enumerate(weights.layers):
            self._layers += self._layer_tensors(layer, f"layer {i}")
        self._head = self._pack(weights.head, None, "the head")

    @property
    def name(self) -> str:
        return f"cpu-{INSTRUCTION_SET}{'-int8' if self._int8 else ''}"

    def run(
        self,
        batch: PackedBatch,
        planes: list[Tensor],
        *,
        capture: bool,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[R, V]`` float32, final hidden states ``[R, H]``, layer outputs ``[L, T, H]`` if captured."""
        spec = self._spec
        depth = spec.num_layers if num_layers is None else num_layers
        weight: PackedWeight = self._head if head is None else head.weight
        cosine, sine = self._rope.upto(int(batch.positions.max()))
        logits, hidden, layers = self._kernels.decoder_stack(
            batch.input_ids,
            batch.positions,
            batch.slot_mapping,
            batch.row_starts,
            batch.block_tables,
            batch.logits_rows,
            batch.block_size,
            self._embedding,
            self._layers[: depth * LAYER_TENSORS],
            self._final_norm,
            weight.tensors,
            cosine,
            sine,
            planes[: 2 * depth],
            spec.windows[:depth],
            spec.num_heads,
            spec.intermediate_size,
            weight.columns,
            spec.eps,
            spec.scale,
            torch.get_num_threads() if self._threads is None else self._threads,
            capture,
        )
        return logits, hidden, layers if capture else None

    def reduced_head(self, token_ids: Tensor) -> PackedWeight:
        """Of ``token_ids`` ``[n]`` alone."""
        return self._kernels.select(self._head, token_ids)

    def _layer_tensors(self, layer: LayerWeights, name: str) -> list[Tensor]:
        """In the order in which decoder_stack reads them."""
        qkv_bias = _cat(layer.q_bias, layer.k_bias, layer.v_bias)
        qkv = self._pack(torch.cat([layer.q, layer.k, layer.v]), qkv_bias, f"q, k or v_proj of {name}")
        out = self._pack(layer.out, layer.out_bias, f"o_proj of {name}")
        m, k = layer.gate.shape
        gate_up = self._kernels.pack_gated(
            self._quantized(torch.cat([layer.gate, layer.up]), f"gate or up_proj of {name}"),
            _cat(layer.gate_bias, layer.up_bias),
            out=self._arena.take(gated_columns(m), k),
        )
        down = self._pack(layer.down, layer.down_bias, f"down_proj of {name}")
        norms = (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        products = [tensor for weight in (qkv, out, gate_up, down) for tensor in weight.tensors]
        return [*products, *block_tensors([_floats(norm) for norm in norms])]

    def _pack(self, weight: Tensor, bias: Tensor | None, name: str) -> PackedWeight:
        return self._kernels.pack(self._quantized(weight, name), bias, out=self._arena.take(*weight.shape))

    def _quantized(self, weight: Tensor, name: str) -> Tensor | Int8Weight:
        return quantize_weight(weight, name) if self._int8 else weight


class _Arena:
    """One piece of memory for all packed weights, so that huge pages pay off for small models too."""

    def __init__(self, kernels: Kernels, spec: FusedSpec, dtype: torch.dtype) -> None:
        self._dtype = dtype
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        layer = (
            packed_elements(q + 2 * kv, spec.hidden_size, dtype)
            + packed_elements(spec.hidden_size, q, dtype)
            + packed_elements(gated_columns(spec.intermediate_size), spec.hidden_size, dtype)
            + packed_elements(spec.hidden_size, spec.intermediate_size, dtype)
        )
        total = spec.num_layers * layer + packed_elements(spec.vocab_size, spec.hidden_size, dtype)
        self._memory = kernels.empty_weights(total, dtype)
        self._used = 0

    def take(self, columns: int, k: int) -> Tensor:
        """The next ``packed_elements(columns, k)`` elements."""
        first = self._used
        self._used += packed_elements(columns, k, self._dtype)
        return self._memory[first : self._used]


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _cat(*tensors: Tensor | None) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None
