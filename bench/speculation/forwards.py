"""Forward times of the target, for the bound that arithmetic sets and for the estimate of what a run takes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.speculation.ratios import bound
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor

Shape = tuple[int, int]  # sequences, rows of each
CONTEXT = 256  # tokens before the last row: a prompt and some output


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Median seconds by shape."""

    seconds: Mapping[Shape, float]

    def bound(self, batch: int, k: int) -> float | None:
        """(k + 1) t(B) / t(B (k + 1)); None if one of them was not measured."""
        plain, verify = self.seconds.get((batch, 1)), self.seconds.get((batch, k + 1))
        return None if plain is None or verify is None else bound(k, plain, verify)

    def best_bound(self, batch: int, max_k: int) -> tuple[float, int] | None:
        """The highest bound of the measured draft lengths up to ``max_k``, and its draft length."""
        found = [
            (value, rows - 1)
            for sequences, rows in self.seconds
            if sequences == batch and 1 < rows <= max_k + 1 and (value := self.bound(batch, rows - 1)) is not None
        ]
        return max(found, default=None)

    def of_rows(self, rows: int) -> float:
        """Seconds of a forward of about so many rows: linear between the measured shapes, proportional beyond."""
        points = sorted({sequences * each: taken for (sequences, each), taken in self.seconds.items()}.items())
        below = [point for point in points if point[0] <= rows]
        above = [point for point in points if point[0] > rows]
        if not above:
            last, taken = points[-1]
            return taken * rows / last
        if not below:
            return above[0][1]
        (left, low), (right, high) = below[-1], above[0]
        return low + (high - low) * (rows - left) / (right - left)


def shapes_for(batches: Iterable[int], ks: Iterable[int], *, max_rows: int) -> list[Shape]:
    """What to measure: plain decoding and each draft length at each batch size, as far as a step has room."""
    lengths = sorted({0, *ks})
    return [(batch, k + 1) for batch in sorted(set(batches)) for k in lengths if batch * (k + 1) <= max_rows]


def measure_forwards(
    executor: Executor,
    shapes: Sequence[Shape],
    *,
    block_size: int,
    context: int = CONTEXT,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> ForwardTimes:
    """Time forwards of every shape with logits for every row, all shapes in turn, in another order each round.

    Re-binds ``executor``. The first round warms up and does not count.
    """
    most_rows = max(rows for _, rows in shapes)
    context = max(1, min(context, executor.info.max_model_len - most_rows))
    per_sequence = -(-(context + most_rows) // block_size)
    most = max(sequences for sequences, _ in shapes)
    storage = KVStorage(
        executor.planes, num_blocks=most * per_sequence, block_size=block_size, device=executor.info.device
    )
    executor.bind(storage)
    ids = random.Random(0)
    batches = {}
    for sequences, rows in shapes:
        spans = [
            RowSpan(
                [ids.randrange(executor.info.num_token_ids) for _ in range(rows)],
                context,
                range(s * per_sequence, (s + 1) * per_sequence),
                0,
            )
            for s in range(sequences)
        ]
        batches[sequences, rows] = PackedBatch.build(spans, block_size=block_size, scratch_block=storage.scratch_block)
    seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    order = list(shapes)
    for number in range(rounds + 1):
        ids.shuffle(order)
        for shape in order:
            started = clock()
            executor.forward(batches[shape])
            if number:
                seconds[shape].append(clock() - started)
    return ForwardTimes({shape: statistics.median(taken) for shape, taken in seconds.items()})
