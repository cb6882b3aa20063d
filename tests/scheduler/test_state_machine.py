"""The scheduler against the toy model, with the real KV manager, under anything that may happen.

Beside it runs a twin without audits, which meets the same arrivals, ends and faults: audits must not change what the
live requests get, nor in which step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler.audit import AuditConfig
from scheduler.config import SchedulerConfig
from scheduler.errors import QueueFull, RequestTooLarge
from scheduler.pace import StepPace
from scheduler.request import ChoiceEvent
from specdec.plan import StepPlan
from tests.scheduler.builders import STOP_ID, Bench, LinearCost, build_request, live_items

MAX_MODEL_LEN = 40
PROMPTS = st.builds(
    lambda family, length, tail: (list(range(10 * family, 10 * family + length)) + tail)[:24],
    family=st.integers(0, 1),
    length=st.integers(0, 10),
    tail=st.lists(st.integers(0, 39), min_size=1, max_size=14),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.sampled_from([1, 2, 4, 8]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 30),
        k=st.integers(0, 9),
        accept=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        prefix_cache=st.booleans(),
        preempt_every_step=st.booleans(),
        itl_slo=st.sampled_from([None, 0.03]),
        seed=st.integers(0, 1000),
        audit_rate=st.sampled_from([1.0, 1.0, 0.5]),
        audit_share=st.sampled_from([None, 0.05, 0.5]),
        audit_blocks=st.integers(4, 40),
        max_audits=st.sampled_from([3, 1000]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        k: int,
        accept: float,
        prefix_cache: bool,
        preempt_every_step: bool,
        itl_slo: float | None,
        seed: int,
        audit_rate: float,
        audit_share: float | None,
        audit_blocks: int,
        max_audits: int,
    ) -> None:
        self.audit = AuditConfig(rate=audit_rate, share=audit_share, max_waiting=max_audits, max_failed_steps=1_000_000)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=k,
            max_waiting_requests=6,
            preempt_every_step=preempt_every_step,
        )
        self.bench, self.twin = (
            Bench(
                num_blocks=num_blocks,
                block_size=block_size,
                prefix_cache=prefix_cache,
                accept=accept,
                seed=seed,
                config=replace(config, audit=audit),
                num_private_blocks=0 if audit is None else audit_blocks,
                pace=None if itl_slo is None else StepPace(itl_slo, LinearCost()),
            )
            for audit in (self.audit, None)
        )
        self.plan: StepPlan | None = None
        self.twin_plan: StepPlan | None = None
        self.live_rows = self.audit_rows = 0  # of steps that had live rows
        self.next_id = 0
        self.ended_early: set[str] = set()  # aborted or failed

    @rule(
        prompt=PROMPTS,
        n=st.sampled_from([1, 1, 1, 2, 4]),
        max_tokens=st.integers(0, 16),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stop=st.sampled_from([(), (), ("ab", "q"), ("e",)]),
        salt=st.sampled_from(["", "other"]),
        read_prefix_cache=st.booleans(),
        stops=st.booleans(),
        own_k=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
    )
    def add(
        self,
        prompt: list[int],
        n: int,
        max_tokens: int,
        priority: int,
        stop: tuple[str, ...],
        salt: str,
        read_prefix_cache: bool,
        stops: bool,
        own_k: int | None,
        prompt_logprobs: int | None,
    ) -> None:
        request = build_request(
            f"r{self.next_id}",
            prompt,
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            stop=stop,
            salt=salt,
            read_prefix_cache=read_prefix_cache,
            stop_token_ids=frozenset({STOP_ID}) if stops else frozenset(),
            num_speculative_tokens=own_k,
            logprobs=0,
            prompt_logprobs=prompt_logprobs,
            seed=self.next_id,
        )
        self.next_id += 1
        bench = self.bench
        fits = bench.manager.fits(max(len(prompt), len(prompt) + max_tokens - 1))
        waiting = bench.scheduler.num_waiting_requests
        for one in (bench, self.twin):
            if not fits:
                with pytest.raises(RequestTooLarge) as refused:
                    one.add(request)
                assert refused.value.reason == "kv_capacity"
            elif waiting == bench.config.max_waiting_requests:
                with pytest.raises(QueueFull) as full:
                    one.add(request)
                assert full.value.reason == "queue_full"
            else:
                one.add(request)

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        had_work = self.bench.scheduler.has_work
        self.plan, self.twin_plan = self.bench.schedule(), self.twin.schedule()
        assert (self.plan is not None) == had_work
        live = [] if self.plan is None else live_items(self.plan)
        undisturbed = () if self.twin_plan is None else self.twin_plan.items
        assert [(list(item.sequence.tokens), item.num_tokens, item.max_drafts) for item in live] == [
            (list(item.sequence.tokens), item.num_tokens, item.max_drafts) for item in undisturbed
        ]
        self.check_audit_share()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def apply(self) -> None:
        assert self.plan is not None
        self.bench.run_and_apply(self.plan)
        if self.twin_plan is not None:
            self.twin.run_and_apply(self.twin_plan)
        self.plan = self.twin_plan = None
        self.check_between_steps()

    @precondition(lambda self: self.plan is None)
    @rule(count=st.integers(1, 5))
    def several_steps(self, count: int) -> None:
        for _ in range(count):
            self.schedule()
            if self.plan is not None:
                self.apply()

    @precondition(lambda self: self.plan is not None)
    @rule()
    def step_raises(self) -> None:
        assert self.plan is not None
        events = self.bench.scheduler.fail(self.plan, "planted")
        self.bench.take(events)
        self.ended_early.update(event.request_id for event in events)
        if self.twin_plan is not None:
            self.twin.take(self.twin.scheduler.fail(self.twin_plan, "planted"))
        self.plan = self.twin_plan = None

    @precondition(lambda self: self.plan is not None and len(live_items(self.plan)) < len(self.plan.items))
    @rule()
    def step_raises_over_its_audits(self) -> None:
        """The twin has none, so its step works: that of the live part must give the same."""
        assert self.plan is not None
        live = self.bench.scheduler.without_audits(self.plan)
        if live is None:
            assert self.bench.scheduler.fail(self.plan, "planted") == []
            assert self.twin_plan is None
        else:
            assert self.twin_plan is not None
            self.bench.run_and_apply(live)
            self.twin.run_and_apply(self.twin_plan)
        self.plan = self.twin_plan = None
        self.check_between_steps()

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def one_sequence_fails(self, data: st.DataObject) -> None:
        assert self.plan is not None
        position = data.draw(st.integers(0, len(self.plan.items) - 1))
        self.bench.step.fail_seq_ids.add(self.plan.items[position].sequence.seq_id)
        if self.twin_plan is not None and position < len(self.twin_plan.items):  # audits come last
            self.twin.step.fail_seq_ids.add(self.twin_plan.items[position].sequence.seq_id)

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.open_requests()))
        self.bench.abort(request_id)
        self.twin.abort(request_id)
        self.ended_early.add(request_id)
        for spec in self.bench.requests[request_id].choices:
            self.bench.finish(request_id, spec.index)

    @invariant()
    def integrity(self) -> None:
        self.bench.scheduler.check_integrity()

    @invariant()
    def live_requests_do_not_notice_audits(self) -> None:
        assert _untimed(self.bench) == _untimed(self.twin)
        assert self.bench.manager.stats() == self.twin.manager.stats()

    @invariant()
    def counters_are_not_negative(self) -> None:
        scheduler = self.bench.scheduler
        assert scheduler.num_running >= 0
        assert scheduler.num_waiting >= 0
        assert scheduler.num_waiting_requests >= 0

    def teardown(self) -> None:
        """Once arrivals stop everything ends, within a bounded number of steps, as it would have ended alone."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        if self.plan is not None:
            self.apply()
        sizes = [
            len(request.prompt_token_ids) + spec.params.max_tokens + 1
            for request in bench.requests.values()
            for spec in request.choices
        ]
        # With forced preemption a token may cost as many steps as the sequence has tokens; else one step is enough to
        # bring the first in rank on by a row.
        steps = 1 + sum(sizes) * (MAX_MODEL_LEN if bench.config.preempt_every_step else 2)
        self.twin.drain(max_steps=steps)
        bench.drain(max_steps=steps + sum(sizes))  # an audit has at least a row in a step without live ones
        assert _untimed(bench) == _untimed(self.twin)
        bench.check_all_free()
        self.check_audits()
        for seq_id in bench.scheduler.take_released():
            bench.step.release(seq_id)
        assert not bench.step.known, "the step was not told of every end"
        for request_id, request in bench.requests.items():
            reasons = [bench.finish(request_id, spec.index).finish_reason for spec in request.choices]
            if request_id not in self.ended_early and "error" not in reasons:
                bench.check_output(request_id)
                self.check_logprobs(request_id)

    def check_logprobs(self, request_id: str) -> None:
        request = self.bench.requests[request_id]
        for spec in request.choices:
            events = self.bench.got[request_id, spec.index]
            for event in events:
                assert [entry.token_id for entry in event.logprobs or ()] == list(event.token_ids)
            prompt = [entry.token_id for entry in events[0].prompt_logprobs or ()]
            assert prompt == ([] if spec.params.prompt_logprobs is None else list(request.prompt_token_ids[1:]))
            assert all(event.prompt_logprobs is None for event in events[1:])

    def open_requests(self) -> list[str]:
        bench = self.bench
        return [
            request_id
            for request_id, request in bench.requests.items()
            if any(
                not bench.got[request_id, spec.index] or bench.got[request_id, spec.index][-1].finish_reason is None
                for spec in request.choices
            )
        ]

    def check_audit_share(self) -> None:
        """No step gives audits more than their share of the budget; beside live rows they get their share of these."""
        if self.plan is None:
            return
        live = live_items(self.plan)
        rows = sum(item.num_tokens for item in self.plan.items if item not in live)
        most = max(1, int(self.audit.row_share * self.bench.config.max_num_batched_tokens))
        assert rows <= most
        if live:
            self.live_rows += sum(item.num_tokens + item.max_drafts for item in live)
            self.audit_rows += rows
        assert self.audit_rows <= self.audit.row_share * self.live_rows + most

    def check_audits(self) -> None:
        """Each choice that ended by itself was audited, or counts as dropped, and none differs."""
        status = self.bench.scheduler.audit_status
        assert status is not None
        assert status.enabled
        failed = self.bench.step.fail_seq_ids  # an audit that fails where the live choice did not is a mismatch
        assert status.results["near_tie"] == 0
        assert status.results["mismatch"] <= len(failed)
        ended = [events[-1].finish_reason for events in self.bench.got.values() if events and events[-1].finish_reason]
        candidates = sum(reason in ("stop", "length") for reason in ended)
        total = sum(status.results.values())
        assert total == candidates if self.audit.rate == 1.0 else total <= candidates
        assert status.num_waiting == status.num_running == status.waiting_tokens == 0

    def check_between_steps(self) -> None:
        self.twin.scheduler.take_record(None)
        record = self.bench.scheduler.take_record(None)
        assert record.num_running + record.num_waiting == (
            self.bench.scheduler.num_running + self.bench.scheduler.num_waiting
        )
        assert min(record.num_prefill_tokens, record.num_decode_tokens, record.num_preemptions) >= 0
        assert 0 <= record.prefix_hits <= record.prefix_queries
        assert record.num_generation_tokens == sum(sequence.num_emitted for sequence in record.sequences)
        ratio = record.kv.fragmentation_ratio
        assert ratio is not None
        assert 0.0 <= ratio <= 1.0


def _untimed(bench: Bench) -> dict[tuple[str, int], list[ChoiceEvent]]:
    return {name: [replace(event, timing=None) for event in events] for name, events in bench.got.items()}


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
