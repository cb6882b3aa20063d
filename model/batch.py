"""The packed ragged batch: what one forward runs on. No padding between sequences.

Row layout of a batch with sequences A (3 rows), B (1 row), C (2 rows)::

    row            0    1    2  |  3  |  4    5
    sequence       A    A    A  |  B  |  C    C
    row_starts     0                3     4          6
    positions     p_A p_A+1 p_A+2 p_B   p_C p_C+1

Row ``i`` attends to positions ``0 .. positions[i]`` of its own sequence, its own included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        row_starts = np.zeros(len(spans) + 1, dtype=np.int32)
        np.cumsum(counts, out=row_starts[1:])
        num_rows = int(row_starts[-1])
        width = max(len(span.blocks) for span in spans)
        tables = np.full((len(spans), max(width, 1)), scratch_block, dtype=np.int32)
        input_ids = np.empty(num_rows, dtype=np.int64)
        positions = np.empty(num_rows, dtype=np.int64)
        slots = np.empty(num_rows, dtype=np.int64)
        logits_rows: list[np.ndarray] = []
        for s, span in enumerate(spans):
            count, first = int(counts[s]), int(row_starts[s])
            if count == 0:
                raise ValueError(f"sequence {s} of the batch has no rows")
            if not 0 <= span.logits_from <= count:
                raise ValueError(
                    f"sequence {s} of the batch wants logits from row {span.logits_from} of its {count} rows on"
                )
            if span.start < 0 or span.start + count > len(span.blocks) * block_size:
                raise ValueError(
                    f"sequence {s} of the batch: positions {span.start}..{span.start + count - 1} leave its "
                    f"{len(span.blocks)} blocks of {block_size} slots"
                )
            tables[s, : len(span.blocks)] = span.blocks
            input_ids[first : first + count] = span.token_ids
            where = np.arange(span.start, span.start + count)
            positions[first : first + count] = where
            slots[first : first + count] = (
                tables[s, where // block_size].astype(np.int64) * block_size + where % block_size
            )
            if span.logits_from < count:
                logits_rows.append(np.arange(first + span.logits_from, first + count))
        rows = np.concatenate(logits_rows) if logits_rows else np.empty(0, dtype=np.int64)
        return cls(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            row_starts=torch.from_numpy(row_starts),
            block_tables=torch.from_numpy(tables),
            logits_rows=torch.from_numpy(rows),
            block_size=block_size,
        )
