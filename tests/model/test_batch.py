"""PackedBatch.build against a naive model that computes every row by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.table import BlockTable
from model.batch import PackedBatch, RowSpan

SCRATCH = 40


@st.composite
def spans_of(draw: st.DrawFn, block_size: int) -> list[RowSpan]:
    """1 to 5 sequences with disjoint, shuffled blocks; tables may cover more than the rows need."""
    free = draw(st.permutations(range(SCRATCH)))
    spans = []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 7))
        num_blocks = draw(st.integers(-(-count // block_size), 8))
        blocks, free = free[:num_blocks], free[num_blocks:]
        start = draw(st.integers(0, num_blocks * block_size - count))
        tokens = draw(st.lists(st.integers(0, 2**31), min_size=count, max_size=count))
        spans.append(RowSpan(tokens, start, blocks, logits_from=draw(st.integers(0, count))))
    return spans


@given(data=st.data(), block_size=st.sampled_from([1, 4, 16, 64]))
def test_every_row_is_what_it_would_be_alone(data: st.DataObject, block_size: int) -> None:
    spans = data.draw(spans_of(block_size))
    batch = PackedBatch.build(spans, block_size=block_size, scratch_block=SCRATCH)
    assert batch.num_sequences == len(spans)
    assert batch.num_rows == sum(len(span.token_ids) for span in spans)
    rows, wanted = [], []
    for span in spans:
        table = BlockTable(block_size)
        table.blocks.extend(span.blocks)
        for i, token in enumerate(span.token_ids):
            if i >= span.logits_from:
                wanted.append(len(rows))
            rows.append((token, span.start + i, table.slot(span.start + i)))
    packed = zip(batch.input_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist(), strict=True)
    assert list(packed) == rows
    assert batch.logits_rows.tolist() == wanted


@given(data=st.data(), block_size=st.sampled_from([1, 4, 16, 64]))
def test_sequences_own_consecutive_rows_and_their_own_table(data: st.DataObject, block_size: int) -> None:
    spans = data.draw(spans_of(block_size))
    batch = PackedBatch.build(spans, block_size=block_size, scratch_block=SCRATCH)
    starts = batch.row_starts.tolist()
    assert starts[0] == 0
    assert [end - first for first, end in pairwise(starts)] == [len(s.token_ids) for s in spans]
    width = max(len(span.blocks) for span in spans)
    assert batch.block_tables.tolist() == [[*s.blocks, *[SCRATCH] * (width - len(s.blocks))] for s in spans]


@given(data=st.data(), block_size=st.sampled_from([1, 4]))
def test_rows_of_different_sequences_never_share_a_slot(data: st.DataObject, block_size: int) -> None:
    spans = data.draw(spans_of(block_size))
    slots = PackedBatch.build(spans, block_size=block_size, scratch_block=SCRATCH).slot_mapping.tolist()
    assert len(set(slots)) == len(slots)
    assert max(slots) < SCRATCH * block_size


def test_dtypes_are_those_that_executors_read() -> None:
    batch = PackedBatch.build([RowSpan([1, 2], 0, [0], logits_from=2)], block_size=4, scratch_block=9)
    assert batch.input_ids.dtype == batch.positions.dtype == batch.slot_mapping.dtype == torch.int64
    assert batch.logits_rows.dtype == torch.int64
    assert batch.logits_rows.shape == (0,)
    assert batch.row_starts.dtype == batch.block_tables.dtype == torch.int32
    assert batch.block_size == 4


GOOD = RowSpan([1, 2], 3, [0, 1], logits_from=0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(GOOD, token_ids=[], logits_from=0), "sequence 1 of the batch has no rows"),
        (replace(GOOD, start=7), r"positions 7\.\.8 leave its 2 blocks of 4 slots"),
        (replace(GOOD, start=-1), r"positions -1\.\.0 leave"),
        (replace(GOOD, blocks=[], start=0), r"positions 0\.\.1 leave its 0 blocks"),
        (replace(GOOD, logits_from=3), "from row 3 of its 2 rows"),
        (replace(GOOD, logits_from=-1), "from row -1 of its 2 rows"),
    ],
)
def test_impossible_span_is_refused_with_its_values(bad: RowSpan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch.build([GOOD, bad], block_size=4, scratch_block=9)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        PackedBatch.build([], block_size=4, scratch_block=9)
