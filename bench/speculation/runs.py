"""One run: a closed loop of requests on a fresh engine, and what was seen of every request and step.

Runs that are compared take turns, step by step, and each has a clock of its own: whatever slows the machine down for
more than a step slows all of them down.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from bench.offline import Completion, OfflineConfig, OfflineEngine, Submission, in_order
from bench.speculation.own_time import OwnTime
from bench.speculation.repeats import repeats_itself
from model.interface import Executor
from specdec.params import SamplingParams
from specdec.plan import StepPlan, StepResult
from specdec.speculation import Measure

MAX_POSITIONS = 64  # of a draft that are counted one by one

_GOLDEN_RATIO = (1 + 5**0.5) / 2  # its multiples' fractions are spread as evenly as can be, however many there are


@dataclass(slots=True)
class DraftCounts:
    """Decode steps of one sequence, and its drafts by position; ``drafting_steps`` had a draft to verify.

    ``drafted[i]`` is how many drafts had a position i, ``accepted[i]`` how many were accepted up to there.
    """

    steps: int = 0
    drafting_steps: int = 0
    emitted: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """One step of the sequence."""
        self.steps += 1
        self.emitted += num_emitted
        if num_drafted:
            self.drafting_steps += 1
            _count(self.drafted, num_drafted)
            _count(self.accepted, num_accepted)


@dataclass(frozen=True, slots=True)
class StepView:
    """What one step ran: decoding sequences, prompt rows beside them, and each decoding sequence's drafts."""

    num_decoding: int
    num_prefill_rows: int
    drafts: tuple[int, ...]
    num_emitted: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run. ``prompt`` is its index in the workload."""

    prompt: int
    token_ids: tuple[int, ...]
    params: SamplingParams
    salt: str


@dataclass(frozen=True, slots=True)
class RequestRun:
    """What became of a request; seconds from when it got a seat."""

    prompt: int
    num_tokens: int
    seconds: float  # to its last token
    tpot: float  # seconds a token behind the first; 0 if there is no other
    repeats: bool
    counts: DraftCounts


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run. ``outputs`` are the ids, one tuple for each request, in their order."""

    concurrency: int
    seconds: float
    requests: tuple[RequestRun, ...]
    outputs: tuple[tuple[int, ...], ...]
    steps: tuple[StepView, ...]
    stage_seconds: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def full_batch_tokens_per_s(self) -> float | None:
        """Of the steps in which all seats decode and no prompt is taken in; None if there was no such step."""
        steps = [s for s in self.steps if s.num_decoding == self.concurrency and not s.num_prefill_rows]
        seconds = sum(step.seconds for step in steps)
        return sum(step.num_emitted for step in steps) / seconds if seconds else None


class MeasuredEngine(OfflineEngine):
    """Counts drafts by sequence and position, and keeps a view of every step. Its ``time`` is its clock."""

    def __init__(
        self, executor: Executor, config: OfflineConfig, *, num_blocks: int, draft: Executor | None, measure: Measure
    ) -> None:
        self.time = OwnTime()
        super().__init__(executor, config, num_blocks=num_blocks, draft=draft, measure=measure, clock=self.time)
        self.counts: dict[int, DraftCounts] = {}
        self.views: list[StepView] = []

    def run_step(self, plan: StepPlan) -> StepResult:
        # Before the step: afterwards the sequences are further.
        decoding = [item.sequence.decoding for item in plan.items]
        rows = sum(item.num_tokens for item, decodes in zip(plan.items, decoding, strict=True) if not decodes)
        result = super().run_step(plan)
        for output, decodes in zip(result.outputs, decoding, strict=True):
            if decodes:
                counts = self.counts.setdefault(output.seq_id, DraftCounts())
                counts.add(output.num_drafted, output.num_accepted, len(output.token_ids))
        self.views.append(
            StepView(
                num_decoding=sum(decoding),
                num_prefill_rows=rows,
                drafts=tuple(
                    output.num_drafted for output, decodes in zip(result.outputs, decoding, strict=True) if decodes
                ),
                num_emitted=result.stats.num_emitted,
                seconds=sum(result.stats.stage_seconds.values()),
            )
        )
        return result


def closed_loop(engine: MeasuredEngine, requests: Sequence[Request], concurrency: int) -> Run:
    """Run all ``requests``: each seat takes the next one when its own has ended.

    The engine is fresh and has ``concurrency`` seats. Nothing is left out of the time: the first prompts and the last
    step, where seats are empty, count as well.
    """
    return closed_loops([engine], requests, concurrency)[0]


def closed_loops(engines: Sequence[MeasuredEngine], requests: Sequence[Request], concurrency: int) -> list[Run]:
    """The same ``requests`` on each of ``engines``, which may share their executors, in turns.

    The next step is that of whoever has run for less time so far, of the first on a tie.
    """
    submissions = [Submission(request.token_ids, request.params, salt=request.salt) for request in requests]
    started = [engine.time() for engine in engines]
    going: dict[int, Generator[None, None, list[Completion]]] = {
        i: engine.stepping(submissions) for i, engine in enumerate(engines)
    }
    done: dict[int, list[Completion]] = {}
    while going:
        i = min(going, key=lambda i: (engines[i].time() - started[i], i))
        engines[i].bind()
        with engines[i].time.running():
            try:
                next(going[i])
            except StopIteration as end:
                done[i] = end.value
                del going[i]
    return [
        _run(engine, requests, submissions, done[i], concurrency, engine.time() - started[i])
        for i, engine in enumerate(engines)
    ]


def _run(
    engine: MeasuredEngine,
    requests: Sequence[Request],
    submissions: Sequence[Submission],
    completions: Sequence[Completion],
    concurrency: int,
    seconds: float,
) -> Run:
    seq_ids = {index: seq_id for seq_id, index in enumerate(in_order(submissions))}
    stages: dict[str, float] = {}
    for step in engine.steps:
        for stage, taken in step.stage_seconds.items():
            stages[stage] = stages.get(stage, 0.0) + taken
    return Run(
        concurrency=concurrency,
        seconds=seconds,
        requests=tuple(
            _request_run(request, done, engine.counts.get(seq_ids[i], DraftCounts()))
            for i, (request, done) in enumerate(zip(requests, completions, strict=True))
        ),
        outputs=tuple(done.token_ids for done in completions),
        steps=tuple(engine.views),
        stage_seconds=stages,
    )


def make_requests(
    workload: str,
    prompts: Sequence[tuple[int, ...]],
    *,
    first: int,
    count: int,
    lengths: Sequence[int],
    temperature: float,
) -> list[Request]:
    """``count`` requests over the workload's prompts from number ``first`` on, round and round.

    ``lengths[i]`` output tokens belong to prompt i, whatever would end them, and so does its seed. Each round over the
    prompts has a salt of its own: a drafter that learns from outputs finds no earlier one of the same prompt.
    """
    requests = []
    for number in range(first, first + count):
        prompt = number % len(prompts)
        params = SamplingParams(
            seed=prompt, max_tokens=lengths[prompt], temperature=temperature, stop_token_ids=frozenset()
        )
        round_number = (number - first) // len(prompts)
        requests.append(Request(prompt, prompts[prompt], params, f"{workload}-{round_number}"))
    return requests


def spread_lengths(count: int, mean: int) -> list[int]:
    """Output tokens of ``count`` prompts: between half of ``mean`` and one and a half, and evenly so in any stretch of
    them. With equal lengths the sequences of a batch without drafts would all end in one step, and the next prompts
    be computed while nobody decodes; a server's requests are not so kind, and those with drafts are not so lucky.
    """
    return [max(1, round(mean * (0.5 + (i * _GOLDEN_RATIO) % 1.0))) for i in range(count)]


def num_blocks(requests: Sequence[Request], seats: int, *, block_size: int, lookahead: int) -> int:
    """Blocks that hold the longest requests in all seats, so that nobody is preempted."""
    slots = max(len(request.token_ids) + request.params.max_tokens for request in requests) + lookahead
    return (seats + 1) * -(-slots // block_size)


def _request_run(request: Request, done: Completion, counts: DraftCounts) -> RequestRun:
    timing = done.timing
    assert timing is not None
    others = len(done.token_ids) - 1
    return RequestRun(
        prompt=request.prompt,
        num_tokens=len(done.token_ids),
        seconds=timing.last_token_time - timing.first_scheduled_time,
        tpot=(timing.last_token_time - timing.first_token_time) / others if others > 0 else 0.0,
        repeats=repeats_itself(done.token_ids),
        counts=counts,
    )


def _count(counts: list[int], upto: int) -> None:
    upto = min(upto, MAX_POSITIONS)
    counts.extend([0] * (upto - len(counts)))
    for i in range(upto):
        counts[i] += 1
