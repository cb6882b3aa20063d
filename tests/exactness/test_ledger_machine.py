"""Random traffic on right code: the ledger looks at every step and never complains, and every answer is the target's.

Requests that share prefixes, with n > 1, salts and prompt logprobs, come and are aborted (also while a step runs); the
pool is so small that sequences are preempted and cached blocks evicted and used again; drafts are right and wrong.
"""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcache.ledger import Ledger
from kvcache.manager import KVCacheManager
from kvcache.storage import KVStorage
from scheduler.config import SchedulerConfig
from scheduler.preemption import PreemptEveryStep, PreemptNever
from scheduler.request import ChoiceEvent, ChoiceSpec, EngineRequest, TextDecision
from scheduler.scheduler import Scheduler
from specdec.params import SamplingParams
from specdec.step import SpeculativeStep
from tests.exactness.tags import VOCAB, PatternDrafter, Plain, TagExecutor, next_token


class StopAt:
    """A text filter that ends a choice, often in the middle of an accepted run: at a token divisible by ``divisor``."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def push(self, token_ids: tuple[int, ...], is_last: bool) -> TextDecision:
        for kept, token in enumerate(token_ids, start=1):
            if token % self.divisor == 0:
                return TextDecision(kept, "", stopped=True)
        return TextDecision(len(token_ids), "")


class TrafficMachine(RuleBasedStateMachine):
    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        spare=st.integers(0, 12),
        k=st.integers(0, 5),
        budget=st.sampled_from([5, 12, 64]),
        prefix_cache=st.booleans(),
        preempt=st.sampled_from([False, False, True]),
        divisor=st.sampled_from([11, 10**6]),
    )
    def build(
        self, block_size: int, spare: int, k: int, budget: int, prefix_cache: bool, preempt: bool, divisor: int
    ) -> None:
        num_blocks = -(-48 // block_size) + spare  # the longest request, and little more
        self.divisor = divisor
        self.ledger = Ledger(num_blocks, block_size)
        self.manager = KVCacheManager(num_blocks, block_size, enable_prefix_cache=prefix_cache, observer=self.ledger)
        self.executor = TagExecutor(Plain())
        storage = KVStorage(self.executor.planes, num_blocks=num_blocks, block_size=block_size)
        self.executor.bind(storage)
        drafter = PatternDrafter()
        self.step = SpeculativeStep(
            self.executor,
            self.manager,
            storage,
            drafters={drafter.name: drafter} if k else {},
            default_drafter=drafter.name if k else None,
            ledger=self.ledger,
        )
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(
                max_num_seqs=min(4, budget),
                max_num_batched_tokens=budget,
                max_model_len=64,
                num_speculative_tokens=k,
            ),
            text_filters=lambda request, index: StopAt(self.divisor),
            forced_preemption=PreemptEveryStep() if preempt else PreemptNever(),
        )
        self.names = itertools.count()
        self.prompts: dict[str, list[int]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}

    def take(self, events: list[ChoiceEvent]) -> None:
        for event in events:
            assert event.error is None, event.error
            self.got[event.request_id, event.index] += event.token_ids

    @rule(
        common=st.integers(1, 24),
        tail=st.lists(st.integers(0, 3), max_size=4),
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 16),
        salt=st.sampled_from(["", "", "tenant"]),
        scored=st.sampled_from([False, False, True]),
    )
    def add(self, common: int, tail: list[int], n: int, max_tokens: int, salt: str, scored: bool) -> None:
        name = str(next(self.names))
        self.prompts[name] = [(3 * i) % VOCAB for i in range(common)] + tail
        params = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, prompt_logprobs=1 if scored else None)
        self.scheduler.add(
            EngineRequest(
                name,
                tuple(self.prompts[name]),
                tuple(ChoiceSpec(j, params) for j in range(n)),
                arrival_time=0.0,
                cache_salt=salt,
                read_prefix_cache=not scored,
            )
        )
        self.got.update(((name, j), []) for j in range(n))

    @precondition(lambda self: self.scheduler.has_work)
    @rule(steps=st.integers(1, 4), abort_in_step=st.integers(0, 20))
    def run(self, steps: int, abort_in_step: int) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            plan = self.scheduler.schedule()
            assert plan is not None
            for seq_id in self.scheduler.take_released():
                self.step.release(seq_id)
            self.executor.order = [item.sequence.seq_id for item in plan.items]
            self.take(self.scheduler.abort(str(abort_in_step)))
            self.take(self.scheduler.apply(plan, self.step.run(plan)))
            self.scheduler.check_integrity()

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.take(self.scheduler.abort(data.draw(st.sampled_from(sorted(self.prompts)))))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.scheduler.has_work:
            self.run(1, -1)
        for (name, _), answer in self.got.items():
            tokens = list(self.prompts[name])
            for token in answer:
                assert token == next_token(tokens)
                tokens.append(token)
        assert self.manager.stats().used_blocks == 0


TestTraffic = TrafficMachine.TestCase
TestTraffic.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
