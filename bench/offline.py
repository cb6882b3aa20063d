"""The engine without HTTP and without asyncio: scheduler and step in a plain loop, for proofs and checks.

Needs torch, transformers and numpy only, so that it also runs where the web packages are missing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcache.manager import KVCacheManager
from kvcache.storage import KVStorage
from model.interface import Executor
from model.kernels import KernelsChoice, get_kernels
from scheduler.config import SchedulerConfig
from scheduler.request import ChoiceEvent, ChoiceSpec, EngineRequest, TextDecision
from scheduler.scheduler import Scheduler
from specdec.drafters.base import Drafter
from specdec.drafters.registry import make_drafter
from specdec.params import SamplingParams
from specdec.plan import StepStats, TokenLogprobs
from specdec.sampling import Sampler
from specdec.step import SpeculativeStep


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    num_blocks: int | None = None  # None: enough for every request of a call at once
    block_size: int = 16
    num_speculative_tokens: int = 4  # 0: off
    drafter: str = "ngram"
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    prefix_cache: bool = True
    preempt_every_step: bool = False
    kernels: KernelsChoice | None = None  # of the sampler; the executor brings its own


@dataclass(frozen=True, slots=True)
class Completion:
    """One request's output; equal to another only if every id and every logprob is equal, bit for bit."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = field(default=0, compare=False)


class KeepAll:
    """The text filter of an engine that deals in ids only: commits everything."""

    def push(self, token_ids: Sequence[int], is_last: bool) -> TextDecision:
        return TextDecision(num_kept=len(token_ids), text="")


class OfflineEngine:
    """Owns a pool and storage for ``executor`` (which it re-binds). One caller at a time.

    ``drafter`` replaces the one that ``config`` names. Requests get seq_id 0, 1, .. in the order of ``generate``.
    """

    def __init__(
        self, executor: Executor, config: OfflineConfig, *, num_blocks: int, drafter: Drafter | None = None
    ) -> None:
        self.manager = KVCacheManager(num_blocks, config.block_size, enable_prefix_cache=config.prefix_cache)
        self.storage = KVStorage(
            executor.planes, num_blocks=num_blocks, block_size=config.block_size, device=executor.info.device
        )
        executor.bind(self.storage)
        k = config.num_speculative_tokens
        chosen = drafter or make_drafter(config.drafter, executor.info.vocab_size)
        self.step = SpeculativeStep(
            executor,
            self.manager,
            self.storage,
            drafters={chosen.name: chosen} if k else {},
            default_drafter=chosen.name if k else None,
            sampler=Sampler(get_kernels(choice=config.kernels)),
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
        )
        self.steps: list[StepStats] = []
        self.num_preemptions = 0
        self._ids = itertools.count()

    def generate(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Run all ``requests`` together. Raises RuntimeError if one of them fails."""
        names = [f"offline-{next(self._ids)}" for _ in requests]
        events: dict[str, list[ChoiceEvent]] = {name: [] for name in names}
        for name, (prompt, params) in zip(names, requests, strict=True):
            self.scheduler.add(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=tuple(prompt),
                    choices=(ChoiceSpec(0, params),),
                    arrival_time=time.monotonic(),
                    read_prefix_cache=params.prompt_logprobs is None,
                )
            )
        while self.scheduler.has_work:
            plan = self.scheduler.schedule()
            if plan is None:
                raise RuntimeError("the scheduler has work but plans no step")
            for seq_id in self.scheduler.take_released():
                self.step.release(seq_id)
            self.before_step()
            result = self.step.run(plan)
            self.steps.append(result.stats)
            for event in self.scheduler.apply(plan, result):
                events[event.request_id].append(event)
            self.after_step()
            self.num_preemptions += self.scheduler.take_record(result.stats).num_preemptions
        return [_join(events[name]) for name in names]

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
