"""The engine without HTTP and without asyncio: scheduler and step in a plain loop, for proofs and checks.

Needs torch, transformers and numpy only, so that it also runs where the web packages are missing.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from kvcache.ledger import Ledger
from kvcache.manager import KVCacheManager
from kvcache.storage import KVStorage
from model.interface import Executor
from model.kernels import KernelsChoice, get_kernels
from scheduler.config import SchedulerConfig
from scheduler.request import ChoiceEvent, ChoiceSpec, ChoiceTiming, EngineRequest, TextDecision
from scheduler.scheduler import Scheduler
from specdec.constraint import TokenConstraint
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.base import Drafter
from specdec.params import SamplingParams
from specdec.plan import StepPlan, StepResult, StepStats, TokenLogprobs
from specdec.sampling import Sampler
from specdec.speculation import DraftLength, Measure, Speculation, SpeculationConfig, build_speculation
from specdec.step import SpeculativeStep

Speculate = Callable[[Executor, KVStorage, Sampler], Speculation]  # on the engine's storage, in which nothing is in use


def ledger_wanted() -> bool:
    """Does the environment ask for the ledger, as it does of a server (TRUEDRAFT_LEDGER)?"""
    return os.environ.get("TRUEDRAFT_LEDGER", "").lower() in ("1", "true", "on", "yes")


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    num_blocks: int | None = None  # None: enough for every request of a call at once
    block_size: int = 16
    num_speculative_tokens: int = 4  # 0: off
    drafter: str = "ngram"
    draft_length: DraftLength = "fixed"
    exit_layers: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    prefix_cache: bool = True
    preempt_every_step: bool = False
    kernels: KernelsChoice | None = None  # of the sampler; the executor brings its own
    ledger: bool = field(default_factory=ledger_wanted)  # check every slot that a forward reads or writes


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's output; equal to another only if every id and every logprob is equal, bit for bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = field(default=0, compare=False)
    timing: ChoiceTiming | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Submission:
    """One request of :meth:`OfflineEngine.run`, with its comings and goings. Steps count from the call on."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0  # the step before which it is added
    abort_after: int | None = None  # steps from its arrival to its abort, unless it has ended by then
    abort_in_step: bool = False  # the abort comes while a step runs, not between two
    salt: str = ""  # requests of different salts share no cached block


def in_order(submissions: Sequence[Submission]) -> list[int]:
    """Indices in the order in which they are added."""
    return sorted(range(len(submissions)), key=lambda index: submissions[index].arrival)


class KeepAll:
    """The text filter of an engine that deals in ids only: commits everything."""

    def push(self, token_ids: Sequence[int], is_last: bool) -> TextDecision:
        return TextDecision(num_kept=len(token_ids), text="")


class OfflineEngine:
    """Owns a pool and storage for ``executor`` (which it re-binds). One caller at a time.

    ``drafter`` replaces those that ``config`` names, and so does all that ``speculate`` builds; ``draft`` is a draft
    model; ``measure`` says what a step costs. Requests with a grammar need a ``constraint``. ``clock``: seconds, for
    the timing of a completion.
    Requests get seq_id 0, 1, .. in the order in which they come.
    """

    def __init__(
        self,
        executor: Executor,
        config: OfflineConfig,
        *,
        num_blocks: int,
        drafter: Drafter | None = None,
        draft: Executor | None = None,
        measure: Measure = measure_step_cost,
        speculate: Speculate | None = None,
        constraint: TokenConstraint | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._executors = tuple(one for one in (executor, draft) if one is not None)
        self.ledger = Ledger(num_blocks, config.block_size) if config.ledger else None
        self.manager = KVCacheManager(
            num_blocks, config.block_size, enable_prefix_cache=config.prefix_cache, observer=self.ledger
        )
        self.storage = KVStorage(
            (*executor.planes, *(draft.planes if draft else ())),
            num_blocks=num_blocks,
            block_size=config.block_size,
            device=executor.info.device,
        )
        self.bind()
        sampler = Sampler(get_kernels(choice=config.kernels))
        k = config.num_speculative_tokens
        speculation = None
        if k and speculate is not None:
            speculation = speculate(executor, self.storage, sampler)
        elif k and drafter is not None:
            speculation = Speculation({drafter.name: drafter}, drafter.name, None)
        elif k:
            speculation = build_speculation(
                SpeculationConfig(config.drafter, config.draft_length, config.exit_layers),
                executor=executor,
                storage=self.storage,
                sampler=sampler,
                draft=draft,
                max_rows=config.max_num_batched_tokens,
                measure=measure,
            )
        self.step = SpeculativeStep(
            executor,
            self.manager,
            self.storage,
            drafters=speculation.drafters if speculation else {},
            default_drafter=speculation.default_drafter if speculation else None,
            sampler=sampler,
            constraint=constraint,
            controller=speculation.controller if speculation else None,
            auto=speculation.auto if speculation else (),
            ledger=self.ledger,
        )
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(
                max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=executor.info.max_model_len,
                num_speculative_tokens=k,
                preempt_every_step=config.preempt_every_step,
            ),
            text_filters=lambda request, index: KeepAll(),
            clock=clock,
        )
        self.steps: list[StepStats] = []
        self.num_preemptions = 0
        self._ids = itertools.count()

    def generate(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Run all ``requests`` together. Raises RuntimeError if one of them fails."""
        return self.run([Submission(tuple(prompt), params) for prompt, params in requests])

    def run(self, submissions: Sequence[Submission]) -> list[Completion]:
        """Run ``submissions``, which come and go as they say; their completions, of aborted ones what there was.

        Raises RuntimeError if one of them fails. The requests get their seq_ids in the order of ``in_order``.
        """
        steps = self.stepping(submissions)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                completions: list[Completion] = end.value
                return completions

    def bind(self) -> None:
        """Give its executors its storage again, after another engine has had them."""
        for executor in self._executors:
            executor.bind(self.storage)

    def stepping(self, submissions: Sequence[Submission]) -> Generator[None, None, list[Completion]]:
        """As :meth:`run`, but stops after every step: others may use the executors until it goes on."""
        names = [f"offline-{next(self._ids)}" for _ in submissions]
        events: dict[str, list[ChoiceEvent]] = {name: [] for name in names}
        coming = deque(in_order(submissions))
        ends: list[tuple[int, int]] = []  # (step, index) of the aborts to come
        step = 0
        while coming or self.scheduler.has_work:
            if not self.scheduler.has_work:
                step = max(step, submissions[coming[0]].arrival)
            while coming and submissions[coming[0]].arrival <= step:
                index = coming.popleft()
                self._add(names[index], submissions[index])
                if (steps := submissions[index].abort_after) is not None:
                    ends.append((step + steps, index))
            due = [index for end, index in ends if end <= step]
            ends = [(end, index) for end, index in ends if end > step]
            for index in due:
                if not submissions[index].abort_in_step:
                    events[names[index]] += self.scheduler.abort(names[index])
            if self.scheduler.has_work:
                in_step = [names[index] for index in due if submissions[index].abort_in_step]
                for event in self._step(in_step):
                    events[event.request_id].append(event)
            step += 1
            yield
        return [_join(events[name]) for name in names]

    def _add(self, name: str, submission: Submission) -> None:
        self.scheduler.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=submission.prompt,
                choices=(ChoiceSpec(0, submission.params),),
                arrival_time=self._clock(),
                cache_salt=submission.salt,
                read_prefix_cache=submission.params.prompt_logprobs is None,
            )
        )

    def _step(self, aborted: Sequence[str]) -> list[ChoiceEvent]:
        """One step, in the middle of which the requests ``aborted`` end."""
        plan = self.scheduler.schedule()
        if plan is None:
            raise RuntimeError("the scheduler has work but plans no step")
        for seq_id in self.scheduler.take_released():
            self.step.release(seq_id)
        self.before_step()
        events = [event for name in aborted for event in self.scheduler.abort(name)]
        result = self.run_step(plan)
        self.steps.append(result.stats)
        events += self.scheduler.apply(plan, result)
        self.after_step()
        self.num_preemptions += self.scheduler.take_record(result.stats).num_preemptions
        return events

    def run_step(self, plan: StepPlan) -> StepResult:
        """Runs a plan; who wants to see both sides of it overrides this."""
        return self.step.run(plan)

    def before_step(self) -> None:
        """Called when a plan is made and its blocks are reserved; a test may disturb what must not matter."""

    def after_step(self) -> None:
        """Called when a step's result was applied; a test may look at what is left."""

    def check_clean(self) -> None:
        """Raise AssertionError unless nothing runs and every block is free or merely cached."""
        assert not self.scheduler.has_work
        self.manager.check_integrity(())
        assert self.manager.stats().used_blocks == 0
        assert sum(stats.alignment_bytes_moved for stats in self.steps) == 0


def _join(events: Sequence[ChoiceEvent]) -> Completion:
    for event in events:
        if event.error is not None:
            raise RuntimeError(event.error)
    last = events[-1]
    assert last.finish_reason is not None
    return Completion(
        token_ids=tuple(itertools.chain.from_iterable(event.token_ids for event in events)),
        logprobs=tuple(itertools.chain.from_iterable(event.logprobs or () for event in events)),
        finish_reason=last.finish_reason,
        prompt_logprobs=tuple(itertools.chain.from_iterable(event.prompt_logprobs or () for event in events)),
        num_cached_tokens=last.timing.num_cached_tokens if last.timing else 0,
        timing=last.timing,
    )


def blocks_for(requests: Sequence[tuple[Sequence[int], SamplingParams]], block_size: int, lookahead: int) -> int:
    """Blocks that hold all ``requests`` to their full length at once."""
    return sum(-(-(len(prompt) + params.max_tokens + lookahead) // block_size) for prompt, params in requests)


def run_offline(
    executor: Executor, config: OfflineConfig, requests: Sequence[tuple[Sequence[int], SamplingParams]], *, batch: int
) -> list[Completion]:
    """Run ``requests`` in groups of ``batch`` on a fresh engine; checks that nothing is left behind."""
    blocks = config.num_blocks or blocks_for(requests, config.block_size, config.num_speculative_tokens)
    engine = OfflineEngine(executor, config, num_blocks=blocks)
    done: list[Completion] = []
    for first in range(0, len(requests), batch):
        done += engine.generate(requests[first : first + batch])
    engine.check_clean()
    return done
