"""What a fault may cost: audits, never a live request, and never an audit that nobody counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.audit import AuditConfig, AuditFinding, AuditStatus
from scheduler.config import SchedulerConfig
from scheduler.engine import Engine
from scheduler.stats import StepRecord
from specdec.plan import StepPlan
from tests.scheduler.builders import Bench, build_request, expected, live_items


class Planted(Exception):
    pass


def broken(*args: object, **kwargs: object) -> Any:
    raise Planted


def bench(*, num_private_blocks: int = 64, **audit: Any) -> Bench:
    config = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        audit=AuditConfig(**{"rate": 1.0, "share": 1.0, **audit}),
    )
    return Bench(config=config, num_private_blocks=num_private_blocks, accept=0.9)


def status(b: Bench) -> AuditStatus:
    found = b.scheduler.audit_status
    assert found is not None
    return found


def raises_with_audits(plan: StepPlan) -> None:
    if len(live_items(plan)) < len(plan.items):
        raise Planted


FAULTS = {
    "deciding": lambda b, patch: patch.setattr("scheduler.audits.hashlib.blake2b", broken),
    "making the case": lambda b, patch: patch.setattr("scheduler.audits._case", broken),
    "measuring the case": lambda b, patch: patch.setattr("scheduler.audit.AuditCase.size", property(broken)),
    "queueing": lambda b, patch: patch.setattr("scheduler.audits.Audits._refusal", broken),
    "planning": lambda b, patch: patch.setattr("scheduler.audits.Audits._plan", broken),
    "parameters": lambda b, patch: patch.setattr("scheduler.audits.plain_params", broken),
    "a table": lambda b, patch: patch.setattr(b.manager, "new_private_table", broken),
    "text filter": lambda b, patch: patch.setattr(b.scheduler._audits, "_text_filters", broken),
    "rerun": lambda b, patch: patch.setattr("scheduler.audits.Rerun", broken),
    "reserving": lambda b, patch: patch.setattr(b.manager, "_reserve_private", broken),
    "no block": lambda b, patch: patch.setattr(b.manager, "_reserve_private", lambda table, missing: False),
    "comparing": lambda b, patch: patch.setattr("scheduler.rerun.Rerun.take", broken),
    "the text": lambda b, patch: patch.setattr("scheduler.rerun.Rerun._compare", broken),
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("at", ["start", "while audits wait and run"])
def test_a_fault_of_the_audits_hurts_nobody_and_every_chosen_choice_is_counted(
    kind: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(share=0.2)
    plant: Callable[[Bench, pytest.MonkeyPatch], None] = FAULTS[kind]
    if at == "start":
        plant(b, monkeypatch)
    b.add(build_request("a", n=3))
    b.add(build_request("b", max_tokens=30))
    if at != "start":
        while b.manager.num_private_used == 0:
            b.run_step()
        plant(b, monkeypatch)
    b.add(build_request("c", n=2, max_tokens=20))
    b.drain()
    b.add(build_request("d"))  # comes when they are off
    b.drain()
    for name in "abcd":
        b.check_output(name)
    b.check_all_free()
    assert not status(b).enabled
    record = b.scheduler.take_record(None)
    assert record.audits_enabled is False
    ended = {(name, i) for name, n in (("a", 3), ("b", 1), ("c", 2), ("d", 1)) for i in range(n)}
    if kind == "deciding":  # then nobody knows who is chosen
        ended -= {(name, i) for name, i in ended if at == "start" or name in "cd"}
    counted = [(one.request_id, one.index) for one in record.audits]
    assert sorted(counted) == sorted(ended)
    assert sum(status(b).results.values()) == len(ended)
    assert {one.what for one in record.audits if one.result != "match"} <= {"fault"}
    if kind != "deciding":
        assert [one.what for one in record.audits if one.request_id == "d"] == ["fault"]


def test_blocks_that_cannot_be_given_back_switch_audits_off(monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench(share=0.2)
    free = b.manager.free

    def free_live_ones(table: Any) -> None:
        if table.private:
            raise Planted
        free(table)

    b.add(build_request("a", n=4))
    while b.manager.num_private_used == 0:
        b.run_step()
    b.add(build_request("b", max_tokens=20))
    monkeypatch.setattr(b.manager, "free", free_live_ones)
    while b.scheduler.has_work:
        plan = b.schedule()
        assert plan is not None
        b.run_and_apply(plan)
    b.check_output("a")
    b.check_output("b")
    assert not status(b).enabled
    assert sum(status(b).results.values()) == 5
    assert b.manager.stats().used_blocks == 0


class Server:
    """An engine over a bench; ``broken`` says which plans raise, before anything is done."""

    def __init__(self, raises: Callable[[StepPlan], None] = raises_with_audits, **audit: Any) -> None:
        self.bench = bench(**audit)
        self.bench.step.before_run = self._before
        self.raises = raises
        self.records: list[StepRecord] = []
        self.plans: list[StepPlan] = []
        self.engine = Engine(self.bench.scheduler, self.bench.step, on_step=self.records.append)

    @property
    def findings(self) -> list[AuditFinding]:
        return [one for record in self.records for one in record.audits]

    def _before(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.raises(plan)

    async def ask(self, name: str, *, max_tokens: int = 8, seed: int = 1) -> str | None:
        """The finish reason; what came must be what would have come without any fault, up to there."""
        request = build_request(name, range(7), max_tokens=max_tokens, seed=seed)
        got: list[int] = []
        last = None
        async for batch in self.engine.submit(request):
            for event in batch:
                got += event.token_ids
                last = event.finish_reason
        tokens, reason, _ = expected(request, 0)
        assert got == (tokens if last == reason else tokens[: len(got)])
        return last

    def run(self, test: Callable[[], Any]) -> None:
        async def main() -> None:
            self.engine.start()
            await asyncio.wait_for(test(), 60)
            assert self.engine.healthy, self.engine.unhealthy_reason
            assert await self.engine.shutdown(timeout=30)
            self.bench.check_all_free()
            self.bench.scheduler.check_integrity()

        asyncio.run(main())

    async def idle(self) -> None:
        for _ in range(20_000):
            if not self.bench.scheduler.has_work:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("waited in vain")


def failed_steps(server: Server) -> int:
    return sum(len(live_items(plan)) < len(plan.items) for plan in server.plans)


def test_an_audit_that_fails_its_step_fails_no_live_request_of_it() -> None:
    server = Server(max_failed_steps=1000)

    async def test() -> None:
        asked = [server.ask(f"r{i}", max_tokens=5 + 7 * (i % 5), seed=i) for i in range(30)]
        assert set(await asyncio.gather(*asked)) == {"length"}
        await server.idle()

    server.run(test)
    assert any(live_items(plan) and len(live_items(plan)) < len(plan.items) for plan in server.plans)
    assert [(one.result, one.what) for one in server.findings] == [("dropped", "step_failed")] * 30
    assert all(record.error is None or record.num_running == 0 for record in server.records)


def test_steps_of_audits_alone_do_not_count_towards_the_engines_health() -> None:
    def raises_for_audits_alone(plan: StepPlan) -> None:
        if not live_items(plan):
            raise Planted

    server = Server(raises_for_audits_alone, share=0.05, max_failed_steps=1000, num_private_blocks=4)  # one at a time

    async def test() -> None:
        assert set(await asyncio.gather(*(server.ask(f"r{i}") for i in range(8)))) == {"length"}
        await server.idle()

    server.run(test)
    alone = [not live_items(plan) for plan in server.plans]
    assert alone[-4:] == [True] * 4  # in a row, and the engine may have no more than two


def test_steps_of_audits_alone_do_not_hide_that_live_ones_fail() -> None:
    server = Server(lambda plan: None, share=0.05)  # a row a step: audits last

    def raises_for_live_ones(plan: StepPlan) -> None:
        if live_items(plan):
            raise Planted

    async def test() -> None:
        await asyncio.gather(*(server.ask(f"r{i}", max_tokens=30) for i in range(8)))
        server.raises = raises_for_live_ones
        for i in range(3):
            assert server.engine.healthy
            assert await server.ask(f"s{i}") == "error"
            before = len(server.plans)
            for _ in range(20_000):
                if len(server.plans) > before + 1 or not server.engine.healthy:
                    break
                await asyncio.sleep(0.001)
            assert i == 2 or not live_items(server.plans[before])
        assert not server.engine.healthy

    with pytest.raises(AssertionError, match="3 steps in a row failed"):
        server.run(test)


def test_an_audit_never_stays_beside_live_requests_for_long_if_it_fails_their_steps() -> None:
    server = Server(share=1.0, num_private_blocks=4)

    async def test() -> None:
        asked = [server.ask(f"r{i}", max_tokens=56 if i == 0 else 2) for i in range(10)]
        assert set(await asyncio.gather(*asked)) == {"length"}

    server.run(test)
    with_audits = [bool(live_items(plan)) for plan in server.plans if len(live_items(plan)) < len(plan.items)]
    assert with_audits == [True] * 3


def test_three_failed_steps_in_a_row_switch_audits_off() -> None:
    server = Server()

    async def test() -> None:
        for i in range(6):
            assert await server.ask(f"r{i}") == "length"
            await server.idle()

    server.run(test)
    assert failed_steps(server) == 3
    assert [(one.result, one.what) for one in server.findings] == [("dropped", "step_failed")] * 6
    assert [record.audits_enabled for record in server.records][-1] is False
    assert server.bench.scheduler.audit_status is not None
    assert server.bench.scheduler.audit_status.dropped == {"step_failed": 6}


def test_failed_steps_that_are_not_in_a_row_leave_audits_on() -> None:
    seen = 0

    def raises_at_times(plan: StepPlan) -> None:
        nonlocal seen
        if len(live_items(plan)) < len(plan.items):
            seen += 1
            if seen % 3:
                raise Planted

    server = Server(raises_at_times)

    async def test() -> None:
        for i in range(20):
            assert await server.ask(f"r{i}") == "length"
            await server.idle()
        assert server.bench.scheduler.audit_status is not None
        assert server.bench.scheduler.audit_status.enabled

    server.run(test)
    assert seen > 9


def test_a_step_that_fails_without_its_audits_too_is_not_theirs() -> None:
    failing: bool | None = None

    def raises_from_the_first_audit_on(plan: StepPlan) -> None:
        nonlocal failing
        if failing is None and live_items(plan) and len(live_items(plan)) < len(plan.items):
            failing = True
        if failing:
            raise Planted

    server = Server(raises_from_the_first_audit_on, max_failed_steps=1)

    async def test() -> None:
        nonlocal failing
        assert await asyncio.gather(server.ask("a", max_tokens=40), server.ask("b", max_tokens=2)) == [
            "error",
            "length",
        ]
        assert failing
        failing = False
        assert await server.ask("c") == "length"
        await server.idle()
        assert server.bench.scheduler.audit_status is not None
        assert server.bench.scheduler.audit_status.enabled

    server.run(test)


def test_a_step_that_fails_too_late_to_run_again_switches_audits_off_at_once() -> None:
    server = Server(lambda plan: None)
    run = server.bench.step.run

    def late(plan: StepPlan) -> Any:
        result = run(plan)
        if live_items(plan):
            raises_with_audits(plan)
        return result

    server.bench.step.run = late  # type: ignore[method-assign]

    async def test() -> None:
        both = await asyncio.gather(*(server.ask(f"s{i}", max_tokens=5 + 30 * (i == 0)) for i in range(4)))
        assert "error" in both
        assert server.bench.scheduler.audit_status is not None
        assert not server.bench.scheduler.audit_status.enabled
        assert await asyncio.gather(*(server.ask(f"t{i}") for i in range(4))) == ["length"] * 4

    server.run(test)
    assert sum(record.error is not None for record in server.records) == 1


def test_a_step_that_fails_while_somebody_of_it_is_aborted_leaves_audits_on() -> None:
    """The blocks that the aborted one gives back are no change that the step made."""
    b = bench()
    b.add(build_request("early", [1, 2, 3], max_tokens=1))
    b.run_step()
    b.add(build_request("late", [4, 5, 6], max_tokens=20))
    plan = b.schedule()
    assert plan is not None
    assert 0 < len(live_items(plan)) < len(plan.items)
    b.abort("late")
    b.scheduler.fail(plan, "planted")
    assert status(b).enabled


def test_the_step_forgets_what_it_knew_of_the_live_sequences_before_it_runs_them_again() -> None:
    server = Server(max_failed_steps=1000)
    forgotten: list[int] = []
    known: list[bool] = []
    release = server.bench.step.release

    def note(seq_id: int) -> None:
        forgotten.append(seq_id)
        release(seq_id)

    def before(plan: StepPlan) -> None:
        if failed:
            again = [item.sequence.seq_id for item in live_items(failed.pop())]
            if live_items(plan):
                known.append(not set(again) <= set(forgotten) or again != [i.sequence.seq_id for i in plan.items])
        forgotten.clear()
        if live_items(plan) and len(live_items(plan)) < len(plan.items):
            failed.append(plan)
        raises_with_audits(plan)

    failed: list[StepPlan] = []
    server.bench.step.release = note  # type: ignore[method-assign]
    server.bench.step.before_run = before

    async def test() -> None:
        asked = (server.ask(f"r{i}", max_tokens=5 + 9 * (i % 4)) for i in range(12))
        assert set(await asyncio.gather(*asked)) == {"length"}
        await server.idle()

    server.run(test)
    assert known
    assert not any(known)


def with_audit_beside_live() -> tuple[Bench, StepPlan]:
    """A plan that holds an audit and request "b"."""
    b = bench()
    b.add(build_request("a", max_tokens=2))
    b.add(build_request("b", max_tokens=40))
    while (plan := b.schedule()) is not None and len(live_items(plan)) in (0, len(plan.items)):
        b.run_and_apply(plan)
    assert plan is not None
    return b, plan


@pytest.mark.parametrize("how", ["fail", "run again"])
def test_a_plan_that_does_not_run_cannot_be_failed_or_run_again(how: str) -> None:
    b, plan = with_audit_beside_live()
    assert b.scheduler.without_audits(plan) is not None
    with pytest.raises(RuntimeError, match="not the one that runs"):
        b.scheduler.fail(plan, "planted") if how == "fail" else b.scheduler.without_audits(plan)


def test_what_is_aborted_between_the_two_runs_gives_its_blocks_back() -> None:
    b, plan = with_audit_beside_live()
    b.abort("b")
    live = b.scheduler.without_audits(plan)
    assert live is not None
    b.run_and_apply(live)
    b.scheduler.check_integrity()
    b.check_all_free()
    assert b.finish("b").finish_reason == "abort"


def test_a_record_is_due_when_audits_go_off_although_none_was_under_way() -> None:
    b = bench()
    assert b.scheduler.take_record(None).audits_enabled is True
    assert not b.scheduler.has_unreported
    b.scheduler.close_audits()
    assert b.scheduler.has_unreported
    assert b.scheduler.take_record(None).audits_enabled is False
    assert not b.scheduler.has_unreported
    assert Bench().scheduler.take_record(None).audits_enabled is None
