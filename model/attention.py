"""Paged attention for packed rows on plain torch operations, row-invariant by fixed shapes.

A row's context is cut into chunks of ``CHUNK`` positions counted from absolute position 0. A chunk is reduced with its
own maximum, and chunks are merged in chunk order::

    position   0 ........ 127 | 128 ...... 255 | 256 ...
    chunk      0              | 1              | 2
    row at 140 reads all of chunk 0, then 128..140 of chunk 1, and nothing of chunk 2

Every tensor operation has a shape that depends only on the tile size and the layer's geometry, never on the context,
the block size or the number of sequences. So a row sees the same operations in the same order whatever else the
tile holds, and a chunk that a row does not have leaves its state untouched (``torch.where``, no arithmetic).

Lanes beyond the newest row of a sequence read that row's own slot and are masked, so memory that the sequence
does not own, or has not written, is never read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.batch import PackedBatch

CHUNK = 128


@dataclass(frozen=True, slots=True)
class TileSequence:
    """Rows ``[first, last]`` of a tile belong to one sequence and stand at consecutive positions."""

    first: int
    count: int
    position: int  # of row ``first``
    blocks: Tensor  # [num_blocks] int: the sequence's block table, at least up to the newest row's position


def tile_sequences(batch: PackedBatch, first: int, last: int) -> list[TileSequence]:
    """The sequences of ``batch`` that have rows in ``[first, last)``, cut to them."""
    starts = batch.row_starts.tolist()
    found = []
    for s in range(batch.num_sequences):
        begin, end = max(starts[s], first), min(starts[s + 1], last)
        if begin < end:
            found.append(TileSequence(begin - first, end - begin, int(batch.positions[begin]), batch.block_tables[s]))
    return found


@dataclass(frozen=True, slots=True)
class _Item:
    """One chunk of one sequence: what all the tile's rows compute, and the sequence's rows keep."""

    slots: Tensor  # [CHUNK] int64
    hidden: Tensor  # [1, T, 1, CHUNK] bool: lanes that the row may not see
    has: Tensor  # [1, T, 1, 1] bool: rows that see at least one lane


@dataclass(slots=True)
class AttentionTile:
    """Which slots each row of a tile of ``num_rows`` rows reads. Shared by all layers of one forward."""

    num_rows: int
    sequences: Sequence[TileSequence]
    block_size: int
    device: torch.device
    mask_seconds: float = 0.0  # wall time that it took to find out which slots a row reads
    _items: dict[int | None, list[_Item]] = field(default_factory=dict)
    _served: Tensor | None = None

    @property
    def served(self) -> Tensor:
        """[1, T, 1, 1] bool: rows of some sequence. Each sees at least itself."""
        if self._served is None:
            served = torch.zeros((1, self.num_rows, 1, 1), dtype=torch.bool)
            for sequence in self.sequences:
                served[:, sequence.first : sequence.first + sequence.count] = True
            self._served = served.to(self.device)
        return self._served

    def items(self, window: int | None) -> list[_Item]:
        """Chunks in the order in which they are merged. ``window``: keys at ``position - window + 1`` and later."""
        if window not in self._items:
            began = time.perf_counter()
            self._items[window] = [item for sequence in self.sequences for item in self._chunks(sequence, window)]
            self.mask_seconds += time.perf_counter() - began
        return self._items[window]

    def _chunks(self, sequence: TileSequence, window: int | None) -> list[_Item]:
        newest = sequence.position + sequence.count - 1
        oldest = 0 if window is None else max(0, sequence.position - window + 1)
        blocks = sequence.blocks.to(torch.int64)
        # Rows of other sequences (and dummy rows) stand at -1: they see no lane.
        row_positions = torch.full((self.num_rows, 1), -1, dtype=torch.int64)
        row_positions[sequence.first : sequence.first + sequence.count, 0] = torch.arange(
            sequence.position, newest + 1, dtype=torch.int64
        )
        items = []
        for chunk in range(oldest // CHUNK, newest // CHUNK + 1):
            lanes = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=torch.int64)
            seen = lanes <= row_positions
            if window is not None:
                seen &= lanes > row_positions - window
            read = lanes.clamp(max=newest)
            slots = blocks[read // self.block_size] * self.block_size + read % self.block_size
            items.append(
                _Item(
                    slots=slots.to(self.device),
                    hidden=(~seen)[None, :, None, :].to(self.device),
                    has=seen.any(-1)[None, :, None, None].to(self.device),
                )
            )
        return items


def paged_attention(
    query: Tensor,
    key_plane: Tensor,
    value_plane: Tensor,
    tile: AttentionTile,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from ``query`` ``[T, H, D]`` to the slots of ``key_plane`` ``[slots, H_kv, D]`` and ``value_plane``
    ``[slots, H_kv, D_v]`` that ``tile`` names; the rows' own K and V must be written already.

    ``sinks`` ``[H]`` are logits that take part in the softmax without a value. Accumulates in float32 and returns a
    new ``[T, H, D_v]`` in the query's dtype; rows of no sequence are zero.
    """
    rows, heads, dim = query.shape
    kv_heads, value_dim = key_plane.shape[1], value_plane.shape[2]
    group = heads // kv_heads
    shape = (kv_heads, rows, group)
    scaled = (query.float() * scaling).view(rows, kv_heads, group, dim)
    grouped = scaled.transpose(0, 1).reshape(kv_heads, rows * group, dim)

    top = query.new_full((*shape, 1), float("-inf"), dtype=torch.float32)  # running maximum
    total = query.new_zeros((*shape, 1), dtype=torch.float32)  # running sum of exponentials
    out = query.new_zeros((*shape, value_dim), dtype=torch.float32)  # running weighted sum of values
    for item in tile.items(window):
        keys = key_plane.index_select(0, item.slots).float().permute(1, 2, 0)  # [H_kv, D, CHUNK]
        values = value_plane.index_select(0, item.slots).float().transpose(0, 1)  # [H_kv, CHUNK, D_v]
        scores = torch.bmm(grouped, keys).view(*shape, CHUNK)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(item.hidden, float("-inf"))
        chunk_top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - chunk_top)
        chunk_total = weights.sum(-1, keepdim=True)
        chunk_out = torch.bmm(weights.view(kv_heads, rows * group, CHUNK), values).view(*shape, value_dim)

        new_top = torch.maximum(top, chunk_top)
        old_share, new_share = torch.exp(top - new_top), torch.exp(chunk_top - new_top)
        total = torch.where(item.has, total * old_share + chunk_total * new_share, total)
        out = torch.where(item.has, out * old_share + chunk_out * new_share, out)
        top = torch.where(item.has, new_top, top)
    if sinks is not None:
        sink = sinks.float().view(kv_heads, 1, group, 1)
        new_top = torch.maximum(top, sink)
        share = torch.exp(top - new_top)
        total = total * share + torch.exp(sink - new_top)
        out = out * share
    result = torch.where(tile.served, out / total, torch.zeros_like(out))
    return result.transpose(0, 1).reshape(rows, heads, value_dim).to(query.dtype)
