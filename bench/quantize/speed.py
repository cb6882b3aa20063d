"""Forward times of two models of the same shape in turn, so that a drift of the machine's speed hits both."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor

DECODED = (1, 2, 4, 8, 16, 32, 64)  # sequences of one row each, with logits for every row
PREFILLED = (256,)  # rows of one sequence, with logits for the last
_CONTEXT = 256
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """Median seconds of a forward of so many rows."""

    rows: int
    plain: float
    quantized: float

    @property
    def ratio(self) -> float:
        return self.plain / self.quantized


def interleaved_forwards(
    plain: Executor, quantized: Executor, *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[Pair]:
    """Each number of rows on both models, one after the other, in another order each round; the first round warms up.

    Re-binds both.
    """
    executors = (plain, quantized)
    context = min(_CONTEXT, plain.info.max_model_len // 2)
    per_sequence = -(-(context + max(PREFILLED)) // _BLOCK)
    storages = [
        KVStorage(one.planes, num_blocks=max(DECODED) * per_sequence, block_size=_BLOCK, device=one.info.device)
        for one in executors
    ]
    for executor, storage in zip(executors, storages, strict=True):
        executor.bind(storage)
    rng = random.Random(0)
    batches = {
        rows: _batch([1] * rows, context, per_sequence, storages[0], plain.info.num_token_ids, rng) for rows in DECODED
    }
    for rows in PREFILLED:
        length = min(rows, plain.info.max_model_len)
        batches[rows] = _batch([length], 0, per_sequence, storages[0], plain.info.num_token_ids, rng)
    seconds: dict[tuple[int, int], list[float]] = {(rows, i): [] for rows in batches for i in range(2)}
    order = list(seconds)
    for number in range(rounds + 1):
        rng.shuffle(order)
        for rows, i in order:
            started = clock()
            executors[i].forward(batches[rows])
            if number:
                seconds[rows, i].append(clock() - started)
    return [Pair(rows, *(statistics.median(seconds[rows, i]) for i in range(2))) for rows in batches]


def _batch(
    counts: Sequence[int], start: int, per_sequence: int, storage: KVStorage, vocabulary: int, rng: random.Random
) -> PackedBatch:
    """``counts[s]`` rows of sequence s from position ``start`` on, with logits for each sequence's last."""
    spans = [
        RowSpan(
            [rng.randrange(vocabulary) for _ in range(count)],
            start,
            list(range(s * per_sequence, (s + 1) * per_sequence)),
            count - 1,
        )
        for s, count in enumerate(counts)
    ]
    return PackedBatch.build(spans, block_size=_BLOCK, scratch_block=storage.scratch_block)
