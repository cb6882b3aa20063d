"""What is there for people who watch: the block map between two steps, and a key for each choice."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace

import pytest

from scheduler.engine import Engine
from scheduler.errors import EngineUnhealthy
from specdec.plan import StepPlan
from tests.scheduler.builders import Bench, build_request
from tests.scheduler.engine_builders import Gate, Harness, collect, run, until


def test_the_block_map_is_taken_between_two_steps() -> None:
    async def test(h: Harness) -> None:
        gate = h.step.before_run = Gate()
        handle = h.engine.submit(build_request(max_tokens=20))
        await gate.wait_entered()
        asking = asyncio.ensure_future(h.engine.block_map())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done(), "the step still has the blocks"
        in_flight: list[bool] = []
        inner = h.engine.scheduler.block_map

        def block_map() -> str:
            in_flight.append(h.engine.scheduler._roster.in_flight is not None)
            return inner()

        h.engine.scheduler.block_map = block_map  # type: ignore[method-assign]
        h.step.before_run = lambda plan: None
        gate.open()
        shown = await asking
        assert in_flight == [False]
        assert len(shown) == h.bench.manager.num_blocks
        assert {"u", "p"} & set(shown)
        await collect(handle)

    run(test)


def test_an_idle_engine_shows_its_blocks_and_stays_idle() -> None:
    async def test(h: Harness) -> None:
        assert set(await h.engine.block_map()) == {"."}
        await until(lambda: h.engine.seconds_since_progress == 0.0)
        await collect(h.engine.submit(build_request(prompt=range(9))))
        await h.settled()
        assert set(await h.engine.block_map()) == {".", "c"}
        assert h.engine.seconds_since_progress == 0.0

    run(test)


def test_who_stops_to_look_is_forgotten() -> None:
    async def test(h: Harness) -> None:
        gate = h.step.before_run = Gate()
        handle = h.engine.submit(build_request())
        await gate.wait_entered()
        asking = [asyncio.ensure_future(h.engine.block_map()) for _ in range(3)]
        await asyncio.sleep(0)
        asking[1].cancel()
        h.step.before_run = lambda plan: None
        gate.open()
        assert await asking[0] == await asking[2]
        await collect(handle)

    run(test)


def test_a_map_that_fails_hurts_no_request() -> None:
    async def test(h: Harness) -> None:
        def fail(tables: object) -> str:
            raise ValueError("planted")

        h.bench.manager.block_map = fail  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="ValueError"):
            await h.engine.block_map()
        got = await collect(h.engine.submit(build_request()))
        assert got[0][-1].finish_reason == "length"

    run(test)


def test_an_engine_that_failed_or_ended_shows_no_blocks() -> None:
    def broken(plan: StepPlan) -> None:
        raise RuntimeError("planted")

    async def main() -> None:
        bench = Bench()
        engine = Engine(bench.scheduler, bench.step, max_consecutive_failures=1)
        with pytest.raises(EngineUnhealthy):
            await engine.block_map()  # not started
        engine.start()
        bench.step.before_run = broken
        await collect(engine.submit(build_request()))
        await until(lambda: not engine.healthy)
        with pytest.raises(EngineUnhealthy):
            await engine.block_map()
        await engine.shutdown(drain=False)

    asyncio.run(main())


def test_who_waits_for_a_map_when_the_engine_ends_is_told() -> None:
    async def main() -> None:
        h = Harness()
        h.engine.start()
        gate = h.step.before_run = Gate()
        h.engine.submit(build_request())
        await gate.wait_entered()
        asking = asyncio.ensure_future(h.engine.block_map())
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(h.engine.shutdown(drain=False, grace=0.0))
        await ending
        with pytest.raises(EngineUnhealthy):
            await asyncio.wait_for(asking, 30)
        gate.open()

    asyncio.run(main())


def test_a_choice_has_one_key_from_its_first_step_to_its_end_and_shares_it_with_none() -> None:
    async def test(h: Harness) -> None:
        requests = [build_request(f"r{i}", range(1, 4 + i), n=1 + i, max_tokens=5, seed=10 * i) for i in range(3)]
        await asyncio.gather(*(collect(h.engine.submit(request)) for request in requests))

    h = run(test)
    emitted: dict[int, int] = defaultdict(int)
    for record in h.records:
        for each in record.sequences:
            emitted[each.key] += each.num_emitted
    finished = {choice.key: choice for record in h.records for choice in record.finished}
    assert len(finished) == 1 + 2 + 3
    assert emitted == {key: choice.timing.num_output_tokens for key, choice in finished.items()}


def test_only_who_asks_for_a_trace_gets_one() -> None:
    bench = Bench()
    plain, traced = build_request("plain"), build_request("traced")
    traced = replace(
        traced, choices=tuple(replace(c, params=replace(c.params, trace_drafts=True)) for c in traced.choices)
    )
    bench.add(plain)
    bench.add(traced)
    inner = bench.step.run_item

    def run_item(item):  # type: ignore[no-untyped-def]
        output = inner(item)
        drafts = tuple(range(output.num_drafted))
        return replace(output, draft_token_ids=drafts if item.sequence.params.trace_drafts else None)

    bench.step.run_item = run_item  # type: ignore[method-assign]
    bench.drain()
    events = bench.got["traced", 0]
    assert all(event.trace is None for event in bench.got["plain", 0])
    assert all(event.trace is not None for event in events if event.token_ids)
    for event in events:
        if event.trace is not None:
            assert event.trace.num_accepted <= min(len(event.trace.draft_token_ids), len(event.token_ids))
            assert len(event.token_ids) - event.trace.num_accepted in (0, 1)
