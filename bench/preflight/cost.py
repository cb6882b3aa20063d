"""What a step costs: t(B, k), the time of a whole step with B decoding sequences of k drafts each, B (k + 1) rows."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache.manager import KVCacheManager
from kvcache.storage import KVStorage
from model.interface import Executor
from model.kernels import KernelsChoice, get_kernels
from specdec.drafters.synthetic import RandomDrafter
from specdec.params import SamplingParams
from specdec.plan import PlanItem, StepPlan
from specdec.sampling import Sampler
from specdec.sequence import Sequence as DecodingSequence
from specdec.step import SpeculativeStep

Which = Literal["median", "low", "high"]

BLOCK_SIZE = 16
PREFILL_CHUNK = 512  # the server's default token budget


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one kind of step: the median of ``rounds`` runs, and their quartiles."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True, slots=True)
class Range:
    """A ratio of two medians, and the lowest and highest that their quartiles allow."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """t(B, k) for every B in ``batches`` and every k in ``ks`` (0 among them), at one context length."""

    context: int
    batches: tuple[int, ...]
    ks: tuple[int, ...]
    timings: Mapping[tuple[int, int], Timing]
    prefill_seconds: float  # of one prompt of ``context`` tokens, alone

    def seconds(self, batch: float, k: float, which: Which = "median") -> float:
        """A median or quartile, linear between what was measured and constant beyond."""

        def measured(b: int, x: int) -> float:
            return float(getattr(self.timings[b, x], which))

        return _interpolate(self.batches, batch, lambda b: _interpolate(self.ks, k, lambda x: measured(b, x)))

    def nearest(self, batch: float) -> int:
        """The measured batch size next to ``batch``."""
        return min(self.batches, key=lambda measured: abs(measured - batch))

    def at(self, batch: int, k: int) -> float:
        return self.timings[batch, k].median

    def bound(self, batch: int, k: int) -> float:
        """(k + 1) t(B) / t(B (k + 1)): the gain if every draft were accepted. Nothing can be faster."""
        return (k + 1) * self.at(batch, 0) / self.at(batch, k)

    def row_cost(self, batch: float, k: int) -> Range:
        """What a draft's row costs, in rows of plain decoding: near 0 while memory bounds the step, near 1 if not."""
        ratio = self.slowdown(batch, k)
        return Range(*((end - 1) / k for end in (ratio.median, ratio.low, ratio.high)))

    def slowdown(self, batch: float, k: float) -> Range:
        """t(B, k) / t(B, 0), and what it could be if both were at the ends of their quartiles."""
        return Range(
            self.seconds(batch, k) / self.seconds(batch, 0),
            self.seconds(batch, k, "low") / self.seconds(batch, 0, "high"),
            self.seconds(batch, k, "high") / self.seconds(batch, 0, "low"),
        )


def measure_cost(
    executor: Executor,
    *,
    batches: Sequence[int],
    ks: Sequence[int],
    context: int,
    rounds: int = 7,
    kernels: KernelsChoice | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> StepCost:
    """Time whole steps (draft, build, verify, accept, roll back, sync) of greedy sequences at ``context`` tokens.

    All kinds of steps are run in turn, in another order each round, so that a drift of the machine's speed meets
    all of them. Re-binds ``executor``. ``context`` is cut to what the model has room for.
    """
    ks = sorted({0, *ks})
    batches = sorted(set(batches))
    context = max(1, min(context, executor.info.max_model_len - max(ks) - 2))
    bench = _Bench(executor, max(batches), max(ks), context, kernels)
    kinds = [(batch, k) for batch in batches for k in ks]
    seconds: dict[tuple[int, int], list[float]] = {kind: [] for kind in kinds}
    prefills: list[float] = []
    order = random.Random(0)
    for number in range(rounds + 1):
        progress(f"step times, round {number} of {rounds}" if number else "step times, warm-up")
        order.shuffle(kinds)
        for batch, k in kinds:
            taken = bench.decode(batch, k)
            if number:  # the first round warms up
                seconds[batch, k].append(taken)
        prefills.append(bench.prefill())
    timings = {kind: Timing.of(taken) for kind, taken in seconds.items()}
    return StepCost(context, tuple(batches), tuple(ks), timings, statistics.median(prefills[1:]))


class _Bench:
    def __init__(self, executor: Executor, batch: int, k: int, context: int, kernels: KernelsChoice | None) -> None:
        per_sequence = -(-(context + k + 1) // BLOCK_SIZE)
        self._manager = KVCacheManager(batch * per_sequence, BLOCK_SIZE, enable_prefix_cache=False)
        storage = KVStorage(
            executor.planes,
            num_blocks=self._manager.num_blocks,
            block_size=BLOCK_SIZE,
            device=executor.info.device,
        )
        executor.bind(storage)
        self._vocab_size = executor.info.num_token_ids
        drafter = RandomDrafter(0, self._vocab_size, ragged=False)  # its drafts cost nothing and are all verified
        self._step = SpeculativeStep(
            executor,
            self._manager,
            storage,
            drafters={drafter.name: drafter},
            default_drafter=drafter.name,
            sampler=Sampler(get_kernels(choice=kernels)),
        )
        self._context = context
        self._ids = random.Random(1)

    def decode(self, batch: int, k: int) -> float:
        """Seconds of one step of ``batch`` sequences with ``k`` drafts each; what their KV holds costs no more."""
        sequences = [self._sequence(i, self._context - 1, k) for i in range(batch)]
        return self._run(sequences, 1, k)

    def prefill(self) -> float:
        """Seconds of one prompt, in chunks as the scheduler would cut it."""
        sequence = self._sequence(0, 0, 0)
        chunks = range(0, self._context, PREFILL_CHUNK)
        return sum(self._run([sequence], min(PREFILL_CHUNK, self._context - first), 0) for first in chunks)

    def _sequence(self, seq_id: int, num_computed: int, k: int) -> DecodingSequence:
        prompt = [self._ids.randrange(self._vocab_size) for _ in range(self._context)]
        table = self._manager.new_table()
        assert self._manager.reserve(table, self._context + k)
        params = SamplingParams(seed=0, temperature=0.0, max_tokens=k + 2)
        sequence = DecodingSequence(seq_id, prompt, params, table)
        sequence.num_computed = num_computed
        return sequence

    def _run(self, sequences: list[DecodingSequence], num_tokens: int, k: int) -> float:
        plan = StepPlan(tuple(PlanItem(sequence, num_tokens, k) for sequence in sequences))
        started = time.perf_counter()
        result = self._step.run(plan)
        taken = time.perf_counter() - started
        assert result.stats.num_rows == len(sequences) * (num_tokens + k), result.stats
        for sequence in sequences:
            if sequence.num_output_tokens:
                self._manager.free(sequence.table)
                self._step.release(sequence.seq_id)
        return taken


def _interpolate(places: Sequence[int], x: float, value: Callable[[int], float]) -> float:
    if x <= places[0]:
        return value(places[0])
    for left, right in itertools.pairwise(places):
        if x <= right:
            share = (x - left) / (right - left)
            return (1 - share) * value(left) + share * value(right)
    return value(places[-1])
