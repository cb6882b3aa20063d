"""The packed ragged batch: what one forward runs on. No padding between sequences.

Row layout of a batch with sequences A (3 rows), B (1 row), C (2 rows)::

    row            0    1    2  |  3  |  4    5
    sequence       A    A    A  |  B  |  C    C
    row_starts     0                3     4          6
    positions     p_A p_A+1 p_A+2 p_B   p_C p_C+1

Row ``i`` attends to positions ``0 .. positions[i]`` of its own sequence, its own included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of one sequence: the input of :meth:`PackedBatch.build`.

    ``token_ids[i]`` stands at logical position ``start + i``; ``blocks`` is the sequence's block
    table and must cover position ``start + len(token_ids) - 1``. Logits are wanted for the rows
    from ``logits_from`` on (``len(token_ids)``: none).
    """

    token_ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits_from: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """T packed rows of S sequences, R of which need logits. All tensors live on the CPU."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64: where the row's K and V are written
    row_starts: Tensor  # [S + 1] int32
    block_tables: Tensor  # [S, max_blocks] int32, padded on the right with the scratch block
    logits_rows: Tensor  # [R] int64, ascending
    block_size: int
    build_seconds: dict[str, float] = field(default_factory=dict)  # positions, slots, block_tables: wall time

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.block_tables.shape[0])

    @classmethod
    def build(cls, spans: Sequence[RowSpan], *, block_size: int, scratch_block: int) -> PackedBatch:
        """Pack ``spans`` in order. Raises ValueError if a span is empty or leaves its rows or block table."""
        if not spans:
            raise ValueError("a packed batch needs at least one sequence")
        counts = np.array([len(span.token_ids) for span in spans], dtype=np.int64)
        for s, (span, count) in enumerate(zip(spans, counts.tolist(), strict=True)):
            _check(s, span, count, block_size)
        row_starts = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(counts, out=row_starts[1:])
        num_rows = int(row_starts[-1])
        input_ids = np.empty(num_rows, dtype=np.int64)
        for first, count, span in zip(row_starts.tolist(), counts.tolist(), spans, strict=False):
            input_ids[first : first + count] = span.token_ids

        began = time.perf_counter()
        tables = np.full((len(spans), max(len(span.blocks) for span in spans)), scratch_block, dtype=np.int32)
        for s, span in enumerate(spans):
            tables[s, : len(span.blocks)] = span.blocks
        had_tables = time.perf_counter()
        row_in_span = np.arange(num_rows) - np.repeat(row_starts[:-1], counts)
        positions = row_in_span + np.repeat([span.start for span in spans], counts)
        had_positions = time.perf_counter()
        blocks = tables[np.repeat(np.arange(len(spans)), counts), positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size
        had_slots = time.perf_counter()
        logits_rows = np.flatnonzero(row_in_span >= np.repeat([span.logits_from for span in spans], counts))
        return cls(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            row_starts=torch.from_numpy(row_starts),
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.from_numpy(logits_rows),
            block_size=block_size,
            build_seconds={
                "positions": had_positions - had_tables,
                "slots": had_slots - had_positions,
                "block_tables": had_tables - began,
            },
        )


def _check(s: int, span: RowSpan, count: int, block_size: int) -> None:
    if count == 0:
        raise ValueError(f"sequence {s} of the batch has no rows")
    if not 0 <= span.logits_from <= count:
        raise ValueError(f"sequence {s} of the batch wants logits from row {span.logits_from} of its {count} rows on")
    if span.start < 0 or span.start + count > len(span.blocks) * block_size:
        raise ValueError(
            f"sequence {s} of the batch: positions {span.start}..{span.start + count - 1} leave its "
            f"{len(span.blocks)} blocks of {block_size} slots"
        )
