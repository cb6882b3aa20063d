"""A step that raises is run again sequence by sequence: who makes it raise fails, the others never notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scheduler.isolation import joined
from scheduler.request import ChoiceEvent
from specdec.plan import SequenceOutput, StepPlan, StepResult, StepStats
from tests.scheduler.builders import build_request
from tests.scheduler.engine_builders import Gate, Harness, check_complete, collect, run, until

MANY = [build_request(f"r{i}", range(3 + i), max_tokens=9, seed=i) for i in range(4)]


def poisoned(h: Harness, guilty: Callable[[int], bool], intact: bool = True) -> None:
    """The step raises before it does anything if one of the guilty is in it."""

    def fail(plan: StepPlan) -> None:
        if any(guilty(item.sequence.seq_id) for item in plan.items):
            raise RuntimeError("0xdeadbeef")

    h.step.before_run = fail
    h.step.intact = intact


async def answers(h: Harness) -> list[dict[int, list[ChoiceEvent]]]:
    return list(await asyncio.gather(*[collect(h.engine.submit(request)) for request in MANY]))


@pytest.mark.parametrize("guilty", [{0}, {3}, {1, 2}], ids=str)
def test_only_the_guilty_fail(guilty: set[int]) -> None:
    async def test(h: Harness) -> None:
        poisoned(h, guilty.__contains__)
        for i, (request, got) in enumerate(zip(MANY, await answers(h), strict=True)):
            if i in guilty:
                assert got[0][-1].error == "the model step failed (RuntimeError)"
                assert not any(event.token_ids for event in got[0])
            else:
                check_complete(request, got)
        assert h.engine.healthy
        await h.settled()

    h = run(test)
    assert "the model step failed (RuntimeError)" in [record.error for record in h.records]
    assert sum(record.num_generation_tokens for record in h.records) == 9 * (4 - len(guilty))


def test_one_choice_of_a_request_fails_without_the_others() -> None:
    async def test(h: Harness) -> None:
        poisoned(h, {1}.__contains__)
        got = await collect(h.engine.submit(build_request("a", n=3)))
        assert [got[i][-1].finish_reason for i in range(3)] == ["length", "error", "length"]

    run(test)


def test_a_state_that_may_have_changed_is_not_run_again() -> None:
    async def test(h: Harness) -> None:
        poisoned(h, {0}.__contains__, intact=False)
        assert {got[0][-1].finish_reason for got in await answers(h)} == {"error"}

    run(test)


def fail_always(plan: StepPlan) -> None:
    raise RuntimeError


@pytest.mark.parametrize(
    ("broken", "intact", "most"),
    [
        (fail_always, True, 3),  # the step's own check fails, too
        (fail_always, False, 3),
        (lambda plan: fail_always(plan) if plan.items else None, True, 30),
        (lambda plan: fail_always(plan) if plan.items else None, False, 3),  # what the check says is not to be trusted
    ],
    ids=["all", "all, late", "requests", "requests, late"],
)
def test_an_engine_in_which_nobody_gets_through_is_given_up(
    broken: Callable[[StepPlan], None], intact: bool, most: int
) -> None:
    async def main() -> None:
        h = Harness()
        h.step.before_run, h.step.intact = broken, intact
        h.engine.start()
        for _ in range(most):
            assert h.engine.healthy
            assert {got[0][-1].finish_reason for got in await answers(h)} == {"error"}
        await until(lambda: not h.engine.healthy)
        assert f"{most} steps in a row failed" in (h.engine.unhealthy_reason or "")
        h.bench.check_all_free()
        await h.engine.shutdown()

    asyncio.run(main())


def test_a_request_that_is_sent_again_and_again_does_not_end_the_engine() -> None:
    async def test(h: Harness) -> None:
        poisoned(h, lambda seq_id: True)
        for i in range(8):
            got = await collect(h.engine.submit(build_request(f"again {i}")))
            assert got[0][-1].finish_reason == "error"
        assert h.engine.healthy
        h.step.before_run = lambda plan: None
        check_complete(MANY[0], await collect(h.engine.submit(MANY[0])))

    run(test)


def test_somebody_who_gets_through_is_none_however_often() -> None:
    async def test(h: Harness) -> None:
        for _ in range(5):
            poisoned(h, lambda seq_id: seq_id % 4 == 0)
            gots = await answers(h)
            assert [got[0][-1].finish_reason for got in gots] == ["error", "length", "length", "length"]
        assert h.engine.healthy

    run(test)


def test_an_abort_between_the_sequences_of_such_a_step_is_safe() -> None:
    async def test(h: Harness) -> None:
        handles = [h.engine.submit(request) for request in MANY]

        def fail(plan: StepPlan) -> None:
            if len(plan.items) > 1:
                raise RuntimeError
            loop.call_soon_threadsafe(handles[2].abort)

        loop = asyncio.get_running_loop()
        h.step.before_run = fail
        h.step.intact = True
        gots = await asyncio.gather(*map(collect, handles))
        assert gots[2][0][-1].finish_reason == "abort"
        for i in (0, 1, 3):
            check_complete(MANY[i], gots[i])
        await h.settled()

    run(test)


def test_the_parts_of_a_step_add_up() -> None:
    parts = [
        StepResult(
            (SequenceOutput(i, (i,)),),
            StepStats(
                num_rows=i, num_sequences=1, num_drafted=2 * i, num_accepted=i, num_emitted=1, rollback_tokens=i,
                blocks_trimmed=i, stage_seconds={"verify": 0.5, **({"draft": 1.0} if i > 1 else {})},
                build_seconds={"slots": 0.25},
            ),
        )
        for i in (1, 2, 3)
    ]  # fmt: skip
    whole = joined(parts)
    assert [output.seq_id for output in whole.outputs] == [1, 2, 3]
    assert whole.stats == StepStats(
        num_rows=6, num_sequences=3, num_drafted=12, num_accepted=6, num_emitted=3, rollback_tokens=6,
        blocks_trimmed=6, stage_seconds={"verify": 1.5, "draft": 2.0}, build_seconds={"slots": 0.75},
    )  # fmt: skip


def test_an_engine_that_is_given_up_fails_everybody_though_its_step_still_runs() -> None:
    async def main() -> None:
        h = Harness()
        gate = h.step.before_run = Gate()
        h.engine.start()
        handles = [h.engine.submit(request) for request in MANY]
        await gate.wait_entered()
        h.engine.give_up("it is frozen")
        gots = await asyncio.gather(*map(collect, handles))
        assert {got[0][-1].error for got in gots} == {"it is frozen"}
        assert h.engine.unhealthy_reason == "it is frozen"
        gate.open()
        await h.engine.shutdown()
        h.bench.check_all_free()
        h.engine.scheduler.check_integrity()

    asyncio.run(main())
