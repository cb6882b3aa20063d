"""The compiled kernels as Python calls. All release the GIL while they run.

Every row's result depends on that row (and the K and V it may see) alone: not on the number of rows, their place,
the threads or the block size. ``threads`` None means torch's thread count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from model.int8 import Int8Weight

TILE_COLUMNS = 32
# The kernels' blocks of rows, as the sources have them (a test compares): kMaxRows, kPanelRows, kRowBlock.
MATMUL_ROWS, PANEL_ROWS, ATTENTION_ROWS = 12, 240, 32
LAYER_TENSORS = 16  # tensors that decoder_stack takes per layer, in the order of fused_cpu's _layer_tensors
_ZERO_POINT = 128  # a weight's int8 value v is packed as the byte v + 128


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight ``[n, k]`` in tiles of 32 output columns: ``data`` is ``[tiles, steps, 32 * width]``, zero-padded."""

    data: Tensor
    columns: int
    bias: Tensor | None  # [tiles * 32] float32
    scales: Tensor | None = None  # int8 only: [tiles * 32] float32

    @property
    def tensors(self) -> list[Tensor]:
        """As operations take it."""
        return block_tensors([self.data, self.bias, self.scales])


class Kernels:
    """Calls into ``torch.ops.truedraft``; :mod:`model.kernels.load` makes one when they are registered."""

    def __init__(self) -> None:
        self._ops: Any = torch.ops.truedraft

    # -- weights ---------------------------------------------------------------------------------------------------

    def empty_weights(self, elements: int, dtype: torch.dtype) -> Tensor:
        """``[elements]`` uninitialised, on huge pages where the system has them."""
        out: Tensor = self._ops.empty_weights(elements, dtype)
        return out

    def pack(
        self,
        weight: Tensor | Int8Weight,
        bias: Tensor | None = None,
        *,
        order: Tensor | None = None,
        out: Tensor | None = None,
    ) -> PackedWeight:
        """Pack ``weight`` ``[n, k]`` bfloat16, float32 or int8. ``order`` names the source row of each packed column
        (-1: zeros; default: ascending); ``out`` is memory of :func:`packed_elements` to use."""
        scales = None
        if isinstance(weight, Int8Weight):
            scales = weight.scales
            dense = (weight.values.view(torch.uint8) ^ _ZERO_POINT).view(torch.int8)
        else:
            dense = weight
        n, k = dense.shape
        if order is None:
            order = torch.arange(n)
        columns = len(order)
        tiles = -(-columns // TILE_COLUMNS)
        padded = torch.full((tiles * TILE_COLUMNS,), -1, dtype=torch.int64)
        padded[:columns] = order
        width = _width(dense.dtype)
        shape = (tiles, -(-k // width), TILE_COLUMNS * width)
        data = torch.empty(shape, dtype=dense.dtype) if out is None else out.view(shape)
        self._ops.pack_weight(dense.contiguous(), padded, data)

        def packed(values: Tensor) -> Tensor:
            return torch.where(padded >= 0, values[padded.clamp(min=0)], 0)

        packed_bias = None if bias is None else packed(bias.float())
        return PackedWeight(data, columns, packed_bias, None if scales is None else packed(scales))

    def pack_gated(
        self, gate_up: Tensor | Int8Weight, bias: Tensor | None = None, *, out: Tensor | None = None
    ) -> PackedWeight:
        """Gate and up projections ``[gate; up]`` ``[2 m, k]`` interleaved for :meth:`gated_matmul`: 16 columns of each
        a tile. ``bias``: of both, ``[2 m]``."""
        m = len(gate_up.scales if isinstance(gate_up, Int8Weight) else gate_up) // 2
        return replace(self.pack(gate_up, bias, order=gated_order(m), out=out), columns=m)

    def select(self, weight: PackedWeight, columns: Tensor) -> PackedWeight:
        """``columns`` ``[n]`` int64 of ``weight`` alone, packed anew: their products have the same bits."""
        count, tiles = len(columns), -(-len(columns) // TILE_COLUMNS)
        width = _width(weight.data.dtype)
        steps = weight.data.shape[1]
        parts = weight.data.view(-1, steps, TILE_COLUMNS, width)
        chosen = weight.data.new_zeros((tiles * TILE_COLUMNS, steps, width))
        chosen[:count] = parts[columns // TILE_COLUMNS, :, columns % TILE_COLUMNS]
        data = chosen.view(tiles, TILE_COLUMNS, steps, width).transpose(1, 2).contiguous().view(tiles, steps, -1)

        def picked(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            found = values.new_zeros(tiles * TILE_COLUMNS)
            found[:count] = values[columns]
            return found

        return PackedWeight(data, count, picked(weight.bias), picked(weight.scales))

    # -- single kernels --------------------------------------------------------------------------------------------

    def matmul(self, rows: Tensor, weight: PackedWeight, *, threads: int | None = None) -> Tensor:
        """``rows`` ``[T, k]`` (of the weight's dtype) times the weight, plus its bias: ``[T, n]`` float32."""
        out: Tensor = self._ops.matmul(rows, weight.data, weight.bias, weight.columns, _threads(threads))
        return out

    def gated_matmul(self, rows: Tensor, weight: PackedWeight, *, threads: int | None = None) -> Tensor:
        """``silu(rows @ gate) * (rows @ up)``: ``[T, m]`` in the weight's dtype."""
        out: Tensor = self._ops.gated_matmul(rows, weight.data, weight.bias, weight.columns, _threads(threads))
        return out

    def quantize_rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``rows`` ``[T, k]`` bfloat16 or float32 as model.int8 has it, in g groups: their values ``[T, k filled to
        whole words]`` int8, scales ``[T, g]`` float32, and -128 times the groups' sums ``[T, g]`` int32."""
        values, scales, offsets = self._ops.quantize_rows(rows.contiguous())
        return values, scales, offsets

    def int8_matmul(self, rows: Tensor, weight: PackedWeight, *, threads: int | None = None) -> Tensor:
        """``rows`` ``[T, k]`` bfloat16 or float32, quantised row by row, times an int8 weight, plus its bias:
        ``[T, n]`` float32, the bits of model.int8.Int8Linear."""
        quantized = self.quantize_rows(rows)
        out: Tensor = self._ops.int8_matmul(*quantized, weight.tensors, weight.columns, _threads(threads))
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """``x`` ``[T, n]`` float32, ``weight`` ``[n]`` float32 -> ``[T, n]`` of ``dtype``."""
        out: Tensor = self._ops.rms_norm(x, weight, eps, dtype)
        return out

    def rope_write(
        self,
        qkv: Tensor,
        k_plane: Tensor,
        v_plane: Tensor,
        positions: Tensor,
        slots: Tensor,
        cosine: Tensor,
        sine: Tensor,
        *,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """Norm (if given) and rotate the heads of ``qkv`` ``[T, (H + 2 H_kv) D]`` float32; K and V go to ``slots``.

        ``cosine``, ``sine``: ``[positions, D / 2]`` float32. Returns the queries ``[T, H, D]`` in the planes' dtype.
        """
        out: Tensor = self._ops.rope_write(qkv, q_norm, k_norm, eps, cosine, sine, positions, slots, k_plane, v_plane)
        return out

    def paged_attention(
        self,
        query: Tensor,
        k_plane: Tensor,
        v_plane: Tensor,
        positions: Tensor,
        row_starts: Tensor,
        block_tables: Tensor,
        *,
        block_size: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        threads: int | None = None,
    ) -> Tensor:
        """``query`` ``[T, H, D]`` against the slots of each row's sequence, positions 0 (or the window's first) to
        the row's own: ``[T, H, D]``. ``window`` and ``softcap`` 0 mean none; the rest is as in PackedBatch."""
        out: Tensor = self._ops.paged_attention(
            query,
            k_plane,
            v_plane,
            positions,
            row_starts,
            block_tables,
            block_size,
            window,
            scale,
            softcap,
            _threads(threads),
        )
        return out

    def decoder_stack(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The whole forward; see model.fused_cpu, its only caller."""
        logits, hidden, layers = self._ops.decoder_stack(*arguments)
        return logits, hidden, layers

    # -- sampling --------------------------------------------------------------------------------------------------

    def argmax_rows(self, logits: Tensor, *, threads: int | None = None) -> Tensor:
        """``[R, V]`` float32 -> ``[R]`` int64: the lowest id among the greatest logits.

        -1 for a row with NaN or +inf, or with nothing but -inf; so do the two below (NaN for the normaliser).
        """
        out: Tensor = self._ops.argmax_rows(logits.contiguous(), _threads(threads))
        return out

    def logsumexp_rows(self, logits: Tensor, *, threads: int | None = None) -> Tensor:
        """``[R, V]`` float32 -> ``[R]`` float64, accumulated in double in one fixed order."""
        out: Tensor = self._ops.logsumexp_rows(logits.contiguous(), _threads(threads))
        return out

    def keyed_sample_rows(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        steps: Tensor,
        *,
        min_p: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Keyed sampling of ``logits`` ``[R, V]`` float32: ``[R]`` int64.

        ``temperatures`` float64 above 0, ``seeds`` int64 (64-bit patterns), ``steps`` int64 (output index t),
        ``min_p`` float64 (0: off), ``top_k`` int64 (0: off), ``top_p`` float64 (1: off), all ``[R]``; applied in the
        order temperature, min_p, top_k, top_p. The noise is specdec.noise's.
        """
        rows = logits.shape[0]
        out: Tensor = self._ops.keyed_sample_rows(
            logits.contiguous(),
            temperatures,
            torch.zeros(rows, dtype=torch.float64) if min_p is None else min_p,
            torch.zeros(rows, dtype=torch.int64) if top_k is None else top_k,
            torch.ones(rows, dtype=torch.float64) if top_p is None else top_p,
            seeds,
            steps,
            _threads(threads),
        )
        return out

    def keyed_uniforms(self, seed: int, step: int, count: int) -> Tensor:
        """U of token ids 0 .. count - 1 at output index ``step``: ``[count]`` float64. ``seed``: 64-bit pattern."""
        out: Tensor = self._ops.keyed_uniforms(seed, step, count)
        return out


def packed_elements(columns: int, k: int, dtype: torch.dtype) -> int:
    """Elements of a packed weight of ``columns`` columns."""
    width = _width(dtype)
    return -(-columns // TILE_COLUMNS) * TILE_COLUMNS * -(-k // width) * width


def gated_columns(m: int) -> int:
    """Packed columns of gate and up projections of ``m`` rows each."""
    return -(-m // 16) * TILE_COLUMNS


def gated_order(m: int) -> Tensor:
    """Source rows of [gate; up] for the packed columns: 16 of the gate, then the same 16 of the up projection."""
    tiles = -(-m // 16)
    rows = torch.arange(tiles * 16).view(tiles, 16)
    gate = torch.where(rows < m, rows, -1)
    up = torch.where(rows < m, rows + m, -1)
    return torch.cat([gate, up], dim=1).view(-1)


def block_tensors(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """A list for an operation that takes no None: an empty tensor stands for it."""
    return [torch.empty(0) if tensor is None else tensor for tensor in tensors]


def _width(dtype: torch.dtype) -> int:
    """Elements of k in a word of 32 bits."""
    if dtype not in (torch.bfloat16, torch.float32, torch.int8):
        raise ValueError(f"the kernels take bfloat16, float32 or int8 weights, got {dtype}")
    return 4 // dtype.itemsize


def _threads(threads: int | None) -> int:
    return torch.get_num_threads() if threads is None else threads
