"""Paged attention for packed rows on plain torch operations, row-invariant by fixed shapes.

A row's context is cut into chunks of ``CHUNK`` positions counted from absolute position 0. A chunk is reduced with its
own maximum, and chunks are merged in chunk order::

    position   0 ........ 127 | 128 ...... 255 | 256 ...
    chunk      0              | 1              | 2
    row at 140 reads all of chunk 0, then 128..140 of chunk 1, and nothing of chunk 2

Every tensor operation has one of a few shapes, of the tile classes and the layer's geometry, never of the context, the
block size or the number of sequences. A sequence's rows are computed among the fewest rows of a class that hold them:
those classes are the tiles' own, which give the same bits. So a row sees the same operations in the same order whatever
else the tile holds, and a chunk that a row does not have leaves its state untouched (``torch.where``, no arithmetic).

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
class _Chunk:
    """One chunk of one sequence's context, as the rows of a part see it."""

    slots: Tensor  # [CHUNK] int64
    hidden: Tensor | None  # [1, size, 1, CHUNK] bool: lanes that a row may not see; None: its own rows see all
    has: Tensor | None  # [1, size, 1, 1] bool: rows that see at least one lane; None: all of its own rows


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's rows, and as many of the rows beside them as fill a class: these are computed and dropped."""

    first: int  # of the tile's rows
    size: int
    own: slice  # the sequence's rows, counted from ``first``
    chunks: list[_Chunk]  # in the order in which they are merged


@dataclass(slots=True)
class AttentionTile:
    """Which slots each row of a tile of ``num_rows`` rows reads. Shared by all layers of one forward.

    Each sequence's rows are computed by themselves, among the fewest rows of ``classes`` (ascending; ``num_rows`` is
    one, even if it is not there) that hold them.
    """

    num_rows: int
    sequences: Sequence[TileSequence]
    block_size: int
    device: torch.device
    classes: Sequence[int] = ()
    mask_seconds: float = 0.0  # wall time that it took to find out which slots a row reads
    _parts: dict[int | None, list[_Part]] = field(default_factory=dict)

    def parts(self, window: int | None) -> list[_Part]:
        """``window``: rows see keys at ``position - window + 1`` and later."""
        if window not in self._parts:
            began = time.perf_counter()
            self._parts[window] = [self._part(sequence, window) for sequence in self.sequences]
            self.mask_seconds += time.perf_counter() - began
        return self._parts[window]

    def _part(self, sequence: TileSequence, window: int | None) -> _Part:
        size = next((c for c in self.classes if sequence.count <= c < self.num_rows), self.num_rows)
        first = min(sequence.first, self.num_rows - size)
        own = slice(sequence.first - first, sequence.first - first + sequence.count)
        return _Part(first, size, own, self._chunks(sequence, size, own, window))

    def _chunks(self, sequence: TileSequence, size: int, own: slice, window: int | None) -> list[_Chunk]:
        newest = sequence.position + sequence.count - 1
        oldest = 0 if window is None else max(0, sequence.position - window + 1)
        blocks = sequence.blocks.to(torch.int64)
        # Rows of other sequences (and dummy rows) stand at -1: they see no lane.
        row_positions = torch.full((size, 1), -1, dtype=torch.int64)
        row_positions[own, 0] = torch.arange(sequence.position, newest + 1, dtype=torch.int64)
        chunks = []
        for chunk in range(oldest // CHUNK, newest // CHUNK + 1):
            lanes = torch.arange(chunk * CHUNK, (chunk + 1) * CHUNK, dtype=torch.int64)
            seen = lanes <= row_positions
            if window is not None:
                seen &= lanes > row_positions - window
            has = seen.any(-1)
            read = lanes.clamp(max=newest)
            slots = blocks[read // self.block_size] * self.block_size + read % self.block_size
            chunks.append(
                _Chunk(
                    slots=slots.to(self.device),
                    hidden=None if bool(seen[own].all()) else (~seen)[None, :, None, :].to(self.device),
                    has=None if bool(has[own].all()) else has[None, :, None, None].to(self.device),
                )
            )
        return chunks


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
    scaled = (query.float() * scaling).view(rows, kv_heads, group, dim)
    sink = None if sinks is None else sinks.float().view(kv_heads, 1, group, 1)
    result = query.new_zeros((rows, kv_heads, group, value_dim), dtype=torch.float32)
    for part in tile.parts(window):
        shape = (kv_heads, part.size, group)
        flat = (kv_heads, part.size * group, dim)
        grouped = scaled[part.first : part.first + part.size].transpose(0, 1).reshape(flat)
        top = query.new_full((*shape, 1), float("-inf"), dtype=torch.float32)  # running maximum
        total = query.new_zeros((*shape, 1), dtype=torch.float32)  # running sum of exponentials
        out = query.new_zeros((*shape, value_dim), dtype=torch.float32)  # running weighted sum of values
        for chunk in part.chunks:
            keys = key_plane.index_select(0, chunk.slots).float().permute(1, 2, 0)  # [H_kv, D, CHUNK]
            values = value_plane.index_select(0, chunk.slots).float().transpose(0, 1)  # [H_kv, CHUNK, D_v]
            scores = torch.bmm(grouped, keys).view(*shape, CHUNK)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if chunk.hidden is not None:
                scores = scores.masked_fill(chunk.hidden, float("-inf"))
            chunk_top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - chunk_top)
            chunk_total = weights.sum(-1, keepdim=True)
            chunk_out = torch.bmm(weights.view(kv_heads, part.size * group, CHUNK), values).view(*shape, value_dim)

            new_top = torch.maximum(top, chunk_top)
            old_share, new_share = torch.exp(top - new_top), torch.exp(chunk_top - new_top)
            new_total = total * old_share + chunk_total * new_share
            new_out = out * old_share + chunk_out * new_share
            if chunk.has is None:
                top, total, out = new_top, new_total, new_out
            else:
                top = torch.where(chunk.has, new_top, top)
                total = torch.where(chunk.has, new_total, total)
                out = torch.where(chunk.has, new_out, out)
        if sink is not None:
            new_top = torch.maximum(top, sink)
            share = torch.exp(top - new_top)
            total = total * share + torch.exp(sink - new_top)
            out = out * share
        own = slice(part.first + part.own.start, part.first + part.own.stop)
        result[own] = (out / total).transpose(0, 1)[part.own]
    return result.view(rows, heads, value_dim).to(query.dtype)
