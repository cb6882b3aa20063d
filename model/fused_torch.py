"""The fused decoder on plain torch operations: any device, bfloat16 and float32.

Rows run in tiles of a fixed number of rows, because torch's matrix products pick other kernels (other rounding) for
other numbers of rows; a tile's last rows are dummies that write nothing and that nobody reads. The residual stream
is float32, like that of the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from model.attention import AttentionTile, paged_attention, tile_sequences
from model.batch import PackedBatch
from model.fused_rope import RopeTable
from model.fused_spec import FusedSpec
from model.fused_weights import DecoderWeights, LayerWeights
from model.generic import BASE_TILE, plan_tiles
from model.int8 import Int8Linear, Quantize, quantize_rows, quantize_weight
from model.interface import ReducedHead
from model.linear_weight import LinearWeight
from model.wide_head import HeadColumns, head_slices, select_columns

_KEPT_WIDE_BYTES = 1 << 30  # int8 weights that take no more in float32 are kept so, others are widened at each use

Linear = Callable[[Any], Tensor]  # of rows in the form of TorchStack._prepare
MakeLinear = Callable[[Tensor, Tensor | None, str], Linear]  # of a weight, its bias and its name


class TorchStack:
    """Keeps ``weights``, moved to ``device``; with ``quantize`` "int8" all products are int8 and the embedding stays.
    ``tile_classes`` may be set as in model.generic."""

    def __init__(
        self, spec: FusedSpec, weights: DecoderWeights, *, device: str = "cpu", quantize: Quantize = "none"
    ) -> None:
        self.tile_classes: tuple[int, ...] = (BASE_TILE,)
        self.mask_seconds = 0.0
        self._spec = spec
        self._device = torch.device(device)
        self._rope = RopeTable(spec, self._device)
        self._embedding = weights.embedding.to(self._device)
        self._int8 = quantize == "int8"
        # Rows as the products take them.
        self._prepare: Callable[[Tensor], Any] = quantize_rows if self._int8 else self._narrow
        linear = self._int8_linear if self._int8 else self._linear
        self._keep_wide = 4 * spec.num_weights <= _KEPT_WIDE_BYTES
        self._layers = [_Layer(layer, self._device, f"layer {i}", linear) for i, layer in enumerate(weights.layers)]
        self._final_norm = weights.final_norm.to(self._device).float()
        self._head_weight = weights.head.to(self._device)
        self._head: HeadColumns | Int8Linear = (
            self._int8_linear(self._head_weight, None, "the head")
            if self._int8
            else HeadColumns(spec.vocab_size, head_slices(self._head_weight), None)
        )

    @property
    def name(self) -> str:
        device = "" if self._device.type == "cpu" else f"-{self._device.type}"
        return f"torch{device}{'-int8' if self._int8 else ''}"

    def run(
        self,
        batch: PackedBatch,
        planes: list[Tensor],
        *,
        capture: bool,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        columns: HeadColumns | Int8Linear = self._head if head is None else head.weight
        decoder = self._layers[:num_layers]
        self.mask_seconds = 0.0
        logits: list[Tensor] = []
        hidden: list[Tensor] = []
        layers: list[Tensor] = []
        for first, count, size in plan_tiles(batch.num_rows, self.tile_classes):
            last = first + count
            rows, outputs = self._run_tile(batch, first, last, size, decoder, planes)
            wanted = batch.logits_rows[(batch.logits_rows >= first) & (batch.logits_rows < last)] - first
            for first_wanted, part_count, part_size in plan_tiles(len(wanted), self.tile_classes):
                part = wanted[first_wanted : first_wanted + part_count]
                picked = torch.zeros(part_size, dtype=torch.int64)
                picked[: len(part)] = part
                final = _norm(rows[picked.to(self._device)], self._final_norm, self._spec.eps)
                hidden.append(self._narrow(final[: len(part)]))
                # Float32 from float32 products: rounding logits to bfloat16 makes exact ties common.
                if isinstance(columns, HeadColumns):
                    found = columns.on_torch(self._narrow(final), len(part))
                else:
                    found = columns(quantize_rows(final))
                logits.append(found[: len(part)].cpu())
            if capture:
                layers.append(torch.stack(outputs)[:, : last - first].cpu())
        none = torch.empty((0, columns.count), dtype=torch.float32)
        no_hidden = torch.empty((0, self._spec.hidden_size), dtype=self._embedding.dtype)
        return (
            (logits[0] if len(logits) == 1 else torch.cat(logits)) if logits else none,
            torch.cat(hidden).cpu() if hidden else no_hidden,
            torch.cat(layers, dim=1) if capture else None,
        )

    def reduced_head(self, token_ids: Tensor) -> HeadColumns | Int8Linear:
        """Of ``token_ids`` ``[n]`` alone."""
        if isinstance(self._head, Int8Linear):
            return self._head.select(token_ids)
        return select_columns(self._head_weight, None, token_ids)

    def _narrow(self, x: Tensor) -> Tensor:
        return x.to(self._embedding.dtype)

    def _linear(self, weight: Tensor, bias: Tensor | None, name: str) -> LinearWeight:
        return LinearWeight(weight.to(self._device), None if bias is None else bias.to(self._device))

    def _int8_linear(self, weight: Tensor, bias: Tensor | None, name: str) -> Int8Linear:
        bias = None if bias is None else bias.to(self._device)
        return Int8Linear(quantize_weight(weight.to(self._device), name), bias, keep_wide=self._keep_wide)

    def _run_tile(
        self, batch: PackedBatch, first: int, last: int, size: int, layers: list[_Layer], planes: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Residual stream ``[size, H]`` float32 of rows ``[first, last)`` and what each of ``layers`` left of it."""
        spec, count = self._spec, last - first
        input_ids = torch.zeros(size, dtype=torch.int64)
        positions = torch.zeros(size, dtype=torch.int64)
        input_ids[:count] = batch.input_ids[first:last]
        positions[:count] = batch.positions[first:last]
        cosines, sines = self._rope.upto(int(positions.max()))
        where = positions.to(self._device)
        cosine, sine = cosines[where][:, None, :], sines[where][:, None, :]  # [T, 1, D / 2]
        slots = batch.slot_mapping[first:last].to(self._device)
        tile = AttentionTile(
            size, tile_sequences(batch, first, last), batch.block_size, self._device, self.tile_classes
        )
        x = self._embedding[input_ids.to(self._device)].float()
        outputs = []
        for i, layer in enumerate(layers):
            k_plane, v_plane = planes[2 * i], planes[2 * i + 1]
            normed = self._prepare(_norm(x, layer.attention_norm, spec.eps))
            q = self._heads(layer.q(normed), layer.q_norm)
            k = self._heads(layer.k(normed), layer.k_norm)
            v = self._narrow(layer.v(normed)).view(size, spec.num_kv_heads, spec.head_dim)
            q, k = self._narrow(_rotate(q, cosine, sine)), self._narrow(_rotate(k, cosine, sine))
            k_plane.index_copy_(0, slots, k[:count])
            v_plane.index_copy_(0, slots, v[:count])
            attended = paged_attention(q, k_plane, v_plane, tile, scaling=spec.scale, window=spec.windows[i] or None)
            x = x + layer.out(self._prepare(attended.reshape(size, -1))).float()
            normed = self._prepare(_norm(x, layer.mlp_norm, spec.eps))
            gated = _silu(layer.gate(normed).float()) * layer.up(normed).float()
            x = x + layer.down(self._prepare(gated)).float()
            outputs.append(x)
        self.mask_seconds += tile.mask_seconds
        return x, outputs

    def _heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        heads = x.float().view(len(x), -1, self._spec.head_dim)
        return heads if norm is None else _norm(heads, norm, self._spec.eps)


class _Layer:
    """One layer's weights on the device; norms in float32."""

    def __init__(self, layer: LayerWeights, device: torch.device, name: str, linear: MakeLinear) -> None:
        self.attention_norm = layer.attention_norm.to(device).float()
        self.mlp_norm = layer.mlp_norm.to(device).float()
        self.q_norm = None if layer.q_norm is None else layer.q_norm.to(device).float()
        self.k_norm = None if layer.k_norm is None else layer.k_norm.to(device).float()
        self.q = linear(layer.q, layer.q_bias, f"q_proj of {name}")
        self.k = linear(layer.k, layer.k_bias, f"k_proj of {name}")
        self.v = linear(layer.v, layer.v_bias, f"v_proj of {name}")
        self.out = linear(layer.out, layer.out_bias, f"o_proj of {name}")
        self.gate = linear(layer.gate, layer.gate_bias, f"gate_proj of {name}")
        self.up = linear(layer.up, layer.up_bias, f"up_proj of {name}")
        self.down = linear(layer.down, layer.down_bias, f"down_proj of {name}")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, float32 in and out."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _silu(x: Tensor) -> Tensor:
    """torch's own silu in float32 rounds differently in its vector loop and in the remainder; its exp does not."""
    return x / (1.0 + torch.exp(-x))


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of ``[T, heads, D]`` in the layout that pairs ``i`` with ``i + D / 2``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)
