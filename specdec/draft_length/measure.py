"""Times forwards of a few sizes, so that the controller knows what rows cost before the first request."""

from __future__ import annotations

import time

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from specdec.draft_length.cost import StepCost

_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_CONTEXT = 128
_ROUNDS = 5


def measure_step_cost(executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
    """Shortest forward times over up to ``max_rows`` rows at a context of some 100 tokens, sizes interleaved.

    Shortest, as a busy machine only adds.

    ``storage`` is bound to ``executor`` and nothing in it is in use: the forwards write to its first blocks.
    """
    sizes = [rows for rows in _ROWS if rows <= max_rows] or [1]
    if len(sizes) < 2:
        sizes = [1, 2]
    batches = {rows: _batch(executor, storage, rows) for rows in sizes}
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    executor.forward(batches[sizes[-1]])
    for _ in range(_ROUNDS):
        for rows, batch in batches.items():
            start = time.perf_counter()
            executor.forward(batch)
            times[rows].append(time.perf_counter() - start)
    return StepCost([(rows, min(seconds)) for rows, seconds in times.items()])


def _batch(executor: Executor, storage: KVStorage, rows: int) -> PackedBatch:
    """``rows`` rows, up to four of a sequence, as when drafts are verified. Sequences share blocks: what they read does
    not matter, only how much."""
    slots = storage.num_blocks * storage.block_size
    context = max(1, min(_CONTEXT, slots, executor.info.max_model_len))
    table = list(range(-(-context // storage.block_size)))
    spans = []
    while rows:
        count = min(4, rows, context)
        spans.append(RowSpan([0] * count, context - count, table, 0))
        rows -= count
    return PackedBatch.build(spans, block_size=storage.block_size, scratch_block=storage.scratch_block)
