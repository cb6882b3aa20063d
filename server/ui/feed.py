"""The newest steps and finished requests, kept for whoever watches. A step costs an append, and waits for nobody.

::

    engine -> observe -> | 17 | 18 | 19 | .. | 528 |      the oldest goes when a new one does not fit
                                   ^ reader A   ^ reader B: each knows the number of the last step that it has got
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from kvcache.manager import KVCacheStats
from scheduler.stats import StepRecord
from server.ui.forms import request_json, step_json
from specdec.plan import StepStats

MAX_STEPS = 512
MAX_SEQUENCES = 16384  # in all steps together: a wide batch is kept for fewer steps
MAX_FINISHED = 256


class KeptStep:
    """What is shown of one step. Made in every step, so it only refers to what the record has already."""

    __slots__ = ("_json", "_seconds", "kv", "n", "running", "sequences", "stats", "time", "tokens", "waiting")

    def __init__(self, n: int, time: float, stats: StepStats, record: StepRecord) -> None:
        self.n = n
        self.time = time  # of the feed's clock, when it was heard of
        self.stats = stats
        self.sequences = record.sequences
        self.running = record.num_running
        self.waiting = record.num_waiting
        self.kv = record.kv
        self.tokens = record.num_generation_tokens
        self._seconds = record.step_seconds + record.overhead_seconds
        self._json: bytes | None = None

    def json(self, started: float) -> bytes:
        """As docs/ui.md has it, made once for all readers; times count from ``started``."""
        if self._json is None:
            self._json = step_json(
                self.n,
                self.time - started,
                self.stats,
                self._seconds,
                self.sequences,
                self.running,
                self.waiting,
                self.kv,
            )
        return self._json


class Feed:
    """For the event loop's thread. Steps are numbered from 1; ``seq`` is the last one's number."""

    def __init__(
        self,
        *,
        max_steps: int = MAX_STEPS,
        max_sequences: int = MAX_SEQUENCES,
        max_finished: int = MAX_FINISHED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._max_steps = max_steps
        self._max_sequences = max_sequences
        self._steps: deque[KeptStep] = deque()
        self._num_sequences = 0  # in them
        self._finished: deque[tuple[int, bytes]] = deque(maxlen=max_finished)  # the step at which it ended, as JSON
        self.started = clock()
        self.seq = 0
        self.num_finished = 0
        self.num_records = 0  # also those without a step, as after an abort
        self.running = 0
        self.waiting = 0
        self.kv: KVCacheStats | None = None  # None: nothing has happened yet

    @property
    def uptime(self) -> float:
        """Seconds since it began to keep steps."""
        return self._clock() - self.started

    def observe(self, record: StepRecord) -> None:
        """Take each step record once, in order."""
        self.num_records += 1
        self.running, self.waiting, self.kv = record.num_running, record.num_waiting, record.kv
        if record.step is not None:
            self.seq += 1
            steps = self._steps
            steps.append(KeptStep(self.seq, self._clock(), record.step, record))
            self._num_sequences += len(record.sequences)
            while len(steps) > self._max_steps or (self._num_sequences > self._max_sequences and len(steps) > 1):
                self._num_sequences -= len(steps.popleft().sequences)
        for choice in record.finished:
            self.num_finished += 1
            self._finished.append((self.seq, request_json(choice, self.seq, self.started)))

    def steps(self, after: int = 0) -> list[KeptStep]:
        """Those behind step ``after`` that are still kept, in order."""
        before_first = self.seq - len(self._steps)
        return list(islice(self._steps, max(0, after - before_first), None))

    def num_dropped(self, after: int) -> int:
        """Steps behind step ``after`` that are not kept any more."""
        return max(0, self.seq - len(self._steps) - after)

    def newest(self) -> Iterator[KeptStep]:
        """The steps that are kept, newest first."""
        return reversed(self._steps)

    def finished(self, after: int = 0) -> list[bytes]:
        """The choices that ended behind the first ``after``, as far as they are kept: oldest first, each as JSON."""
        before_first = self.num_finished - len(self._finished)
        return [json for _, json in islice(self._finished, max(0, after - before_first), None)]

    def num_finished_by(self, seq: int) -> int:
        """How many had ended when step ``seq`` was over; those that are not kept any more count as ended."""
        return self.num_finished - sum(1 for at, _ in self._finished if at > seq)
