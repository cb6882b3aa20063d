"""Audits one by one: what is chosen, compared and dropped, and what they may take."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler.audit import AuditConfig, AuditFinding
from scheduler.audits import Audits
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from specdec.plan import StepPlan
from tests.scheduler.builders import STOP_ID, Bench, ToyFilter, build_request, live_items


def bench(*, num_private_blocks: int = 64, accept: float = 0.9, budget: int = 32, **audit: Any) -> Bench:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=64,
        audit=AuditConfig(**{"rate": 1.0, "share": 1.0, **audit}),
    )
    return Bench(config=config, num_private_blocks=num_private_blocks, accept=accept)


def findings(b: Bench) -> list[AuditFinding]:
    """Finish everything; returns what the audits found."""
    b.drain()
    b.check_all_free()
    return list(b.scheduler.take_record(None).audits)


class TestChoosing:
    def test_at_rate_1_every_choice_is_audited_by_itself(self) -> None:
        b = bench()
        b.add(build_request("a", n=3))
        b.add(build_request("b", stop_token_ids=frozenset({STOP_ID}), stop=("ab", "q")))
        b.add(build_request("c", max_tokens=0, prompt_logprobs=0))
        found = findings(b)
        assert sorted((one.request_id, one.index) for one in found) == [
            ("a", 0),
            ("a", 1),
            ("a", 2),
            ("b", 0),
            ("c", 0),
        ]
        assert {one.result for one in found} == {"match"}

    def test_a_rate_is_met_and_the_choice_is_repeatable(self) -> None:
        audits = [
            Audits(AuditConfig(rate=0.3), Bench().manager, ToyFilter, token_budget=8, next_seq_id=int) for _ in range(2)
        ]
        chosen = [[one.chosen(f"r{i}", i % 3) for i in range(4000)] for one in audits]
        assert chosen[0] == chosen[1]
        assert 0.27 < sum(chosen[0]) / 4000 < 0.33

    def test_a_request_that_was_aborted_or_failed_is_not_audited(self) -> None:
        b = bench()
        b.add(build_request("a", max_tokens=30))
        b.add(build_request("b", max_tokens=30))
        b.run_step()
        b.abort("a")
        b.step.fail_seq_ids.add(1)
        assert findings(b) == []
        assert b.finish("b").finish_reason == "error"

    def test_without_a_rate_there_is_nothing(self) -> None:
        b = bench(rate=0.0)
        b.add(build_request())
        assert findings(b) == []
        assert b.scheduler.audit_status is None


class TestRerun:
    def test_an_audit_runs_without_drafts_and_from_a_cold_cache(self) -> None:
        b = bench(accept=1.0)
        prompt = list(range(16))
        b.add(build_request("warm", prompt))
        b.drain()
        queries = b.manager.stats().prefix_queries
        b.add(build_request("a", prompt))
        while not (plan := b.schedule()) or live_items(plan):
            assert plan is not None
            b.run_and_apply(plan)
        after = b.manager.stats()
        item = plan.items[0]
        assert (item.num_tokens, item.max_drafts) == (16, 0)
        assert min(item.sequence.table.blocks) >= b.manager.num_blocks
        b.run_and_apply(plan)
        assert [one.result for one in findings(b)] == ["match", "match"]
        assert b.manager.stats() == after
        assert after.prefix_queries == queries + 15

    def test_a_wrong_draft_that_was_accepted_is_a_mismatch_at_its_place(self) -> None:
        b = bench(accept=1.0)
        b.step.wrong_drafts = {2}
        b.add(build_request("a", max_tokens=12))
        (found,) = findings(b)
        assert (found.result, found.what, found.position) == ("mismatch", "token_ids", 2)
        assert found.case is not None
        assert found.case.token_ids == tuple(b.token_ids("a"))
        assert found.rerun_token_ids[:2] == found.case.token_ids[:2]
        assert found.rerun_token_ids[2] != found.case.token_ids[2]
        assert len(found.rerun_token_ids) <= len(found.case.token_ids)


class TestBounds:
    def test_beside_live_rows_audits_get_their_share_of_these(self) -> None:
        b = bench(share=0.25, accept=0.0)
        b.add(build_request("a", max_tokens=2))
        b.drain()
        b.scheduler.take_record(None)
        for i in range(4):
            b.add(build_request(f"audited-{i}", max_tokens=8))
        live = audits = 0
        longest = build_request("live", max_tokens=50, num_speculative_tokens=0)
        b.add(longest)
        for _ in range(40):
            plan = b.schedule()
            assert plan is not None
            rows = sum(item.num_tokens + item.max_drafts for item in live_items(plan))
            assert rows > 0
            live += rows
            audits += sum(item.num_tokens + item.max_drafts for item in plan.items) - rows
            b.run_and_apply(plan)
        assert 0 < audits <= 0.25 * live

    def test_no_step_gives_audits_more_than_their_share_of_the_budget(self) -> None:
        b = bench(share=0.25, budget=32)
        b.add(build_request("a", range(20), n=3))
        most = 0
        while b.scheduler.has_work:
            plan = b.schedule()
            assert plan is not None
            most = max(most, sum(item.num_tokens for item in plan.items if item.sequence.table.private))
            b.run_and_apply(plan)
        assert most == 8

    @pytest.mark.parametrize(
        ("limits", "reason"),
        [
            ({"max_waiting": 1}, "queue_full"),
            ({"max_waiting_tokens": 20}, "queue_tokens"),
            ({"num_private_blocks": 2}, "too_large"),
        ],
    )
    def test_what_finds_no_room_is_dropped_and_counted(self, limits: dict[str, int], reason: str) -> None:
        b = bench(**limits)
        b.add(build_request("a", n=3))
        dropped = [one.what for one in findings(b) if one.result == "dropped"]
        assert dropped
        assert set(dropped) == {reason}
        status = b.scheduler.audit_status
        assert status is not None
        assert status.dropped == {reason: len(dropped)}
        assert sum(status.results.values()) == 3

    @pytest.mark.parametrize("during_a_step", [False, True])
    def test_closing_drops_what_waits_and_runs_and_takes_no_more(self, during_a_step: bool) -> None:
        b = bench()
        b.add(build_request("a", n=4, max_tokens=6))
        b.add(build_request("b", n=4, max_tokens=30))
        while b.manager.num_private_used == 0:
            b.run_step()
        plan = b.schedule() if during_a_step else None
        b.scheduler.close_audits()
        if plan is not None:
            b.run_and_apply(plan)
        b.scheduler.check_integrity()
        assert b.manager.num_private_used == 0
        found = findings(b)
        assert {one.what for one in found if one.result == "dropped"} == {"shutting_down"}
        assert [b.finish("b", j).finish_reason for j in range(4)] == ["length"] * 4
        assert {one.result for one in found if one.request_id == "b"} == {"dropped"}
        assert len(found) == 8


@pytest.mark.parametrize("drain", [False, True])
def test_a_shutdown_does_not_wait_for_audits(drain: bool) -> None:
    async def main() -> None:
        b = bench(share=0.05)
        live_only: list[StepPlan] = []
        engine = Engine(b.scheduler, b.step, on_step=lambda record: found.extend(record.audits))
        found: list[AuditFinding] = []
        engine.start()
        handles = [engine.submit(build_request(f"r{i}", range(30), max_tokens=20)) for i in range(6)]
        for handle in handles:
            async for _ in handle:
                pass
        b.step.before_run = live_only.append
        assert await engine.shutdown(drain=drain)
        assert len(live_only) <= 1
        b.check_all_free()
        assert any(one.what == "shutting_down" for one in found)
        assert len(found) == 6

    asyncio.run(main())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"rate": -0.1}, "rate"),
        ({"rate": 1.5}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": 0.5, "share": 0.0}, "share"),
        ({"rate": 0.5, "share": 2.0}, "share"),
        ({"rate": 0.5, "max_waiting": 0}, "queue"),
        ({"rate": 0.5, "max_waiting_tokens": 0}, "queue"),
        ({"rate": 0.5, "max_failed_steps": 0}, "failed step"),
    ],
)
def test_a_config_out_of_range_is_refused(values: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        AuditConfig(**values)
