"""An engine at the other end of a socket is an engine: what it is asked, what it answers, and how either side ends."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from scheduler.config import SchedulerConfig
from scheduler.errors import QueueFull, RequestTooLarge
from scheduler.request import ChoiceEvent, EngineRequest
from tests.scheduler.builders import STOP_ID, build_request
from tests.scheduler.engine_builders import Gate, Harness, check_complete, collect, ids, until
from tests.scheduler.engine_builders import run as run_here
from tests.scheduler.remote.builders import RemoteHarness, run

NARROW = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, max_waiting_requests=2)


def mixed_requests(count: int) -> list[EngineRequest]:
    rng = random.Random(7)
    return [
        build_request(
            f"r{i}",
            prompt=[rng.randrange(40) for _ in range(rng.randrange(1, 30))],
            n=rng.choice((1, 1, 3)),
            max_tokens=rng.choice((0, 1, 9, 20)),
            stop_token_ids=frozenset({STOP_ID} if rng.random() < 0.5 else ()),
            stop=rng.choice(((), ("a",), ("bc", "d"))),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, 1)),
            priority=rng.randrange(3),
            salt=rng.choice(("", "s")),
            num_speculative_tokens=rng.choice((None, 0, 2)),
            seed=i,
        )
        for i in range(count)
    ]


def joined(events: list[ChoiceEvent]) -> dict[str, Any]:
    """What a request decides of a choice, however its tokens were batched."""
    last = events[-1]
    return {
        "ids": ids(events),
        "text": "".join(event.text for event in events),
        "logprobs": [entry for event in events for entry in event.logprobs or ()],
        "prompt_logprobs": [entry for event in events for entry in event.prompt_logprobs or ()],
        "end": (last.finish_reason, last.stop_reason, last.error),
        "counts": None if last.timing is None else (last.timing.num_prompt_tokens, last.timing.num_output_tokens),
    }


async def answers(h: Harness | RemoteHarness, requests: list[EngineRequest]) -> list[dict[int, dict[str, Any]]]:
    got = await asyncio.gather(*(collect(h.engine.submit(request)) for request in requests))
    return [{index: joined(events) for index, events in choices.items()} for choices in got]


def test_requests_get_what_the_engine_in_this_process_gives_them() -> None:
    requests = mixed_requests(40)
    found: list[Any] = []

    async def test(h: Any) -> None:
        found.append(await answers(h, requests))

    here, there = run_here(test), run(test)
    assert found[1] == found[0]
    for h in (here, there):
        finished = [choice for record in h.records for choice in record.finished]
        assert len(finished) == sum(len(request.choices) for request in requests)
        assert sum(record.num_generation_tokens for record in h.records) == sum(
            choice.timing.num_output_tokens for choice in finished
        )
    assert any(event["logprobs"] and event["end"][0] == "stop" for got in found[0] for event in got.values())


def test_what_one_step_brings_is_one_batch() -> None:
    async def test(h: RemoteHarness) -> None:
        handle = h.engine.submit(build_request(n=3, max_tokens=6, num_speculative_tokens=0))
        batches = [batch async for batch in handle]
        assert any(len({event.index for event in batch}) == 3 for batch in batches)

    run(test)


class TestRefusals:
    """Decided on this side: nothing is sent."""

    def test_a_full_queue(self) -> None:
        async def test(h: RemoteHarness) -> None:
            gate = h.step.before_run = Gate()
            handles = [h.engine.submit(build_request(f"r{i}")) for i in range(2)]
            with pytest.raises(QueueFull):
                h.engine.submit(build_request("one too many"))
            with pytest.raises(QueueFull):
                h.engine.reserve(1, 1)
            gate.open()
            await asyncio.gather(*map(collect, handles))
            await until(lambda: h.engine.room.num_requests == 0)
            await collect(h.engine.submit(build_request("one too many")))

        run(test, RemoteHarness(config=NARROW))

    def test_who_has_left_the_queue_makes_room_while_it_runs(self) -> None:
        async def test(h: RemoteHarness) -> None:
            first = [h.engine.submit(build_request(f"r{i}", max_tokens=50)) for i in range(2)]
            await asyncio.gather(*(anext(handle) for handle in first))
            second = [h.engine.submit(build_request(f"s{i}", max_tokens=1)) for i in range(2)]
            await asyncio.gather(*map(collect, (*first, *second)))

        run(test, RemoteHarness(config=NARROW))

    def test_prompts_that_were_let_in_together_are_not_refused_one_by_one_on_the_other_side(self) -> None:
        config = replace(NARROW, max_num_seqs=1, max_waiting_requests=8, max_waiting_tokens=10)

        async def test(h: RemoteHarness) -> None:
            requests = [build_request(f"r{i}", prompt=[i] * 9) for i in range(5)]
            with h.engine.reserve(5, 45) as reservation:  # nobody waits: any is let in
                handles = [h.engine.submit(request, reservation) for request in requests]
            for request, got in zip(requests, await asyncio.gather(*map(collect, handles)), strict=True):
                check_complete(request, got)

        run(test, RemoteHarness(config=config))

    def test_what_could_never_run_and_an_id_in_use(self) -> None:
        async def test(h: RemoteHarness) -> None:
            with pytest.raises(RequestTooLarge, match="context of 64"):
                h.engine.submit(build_request(max_tokens=100))
            handle = h.engine.submit(build_request())
            with pytest.raises(ValueError, match="in use"):
                h.engine.submit(build_request())
            check_complete(build_request(), await collect(handle))
            check_complete(build_request(), await collect(h.engine.submit(build_request())))

        run(test)

    def test_what_cannot_be_sent_leaves_the_reservation_as_it_was(self) -> None:
        async def test(h: RemoteHarness) -> None:
            with h.engine.reserve(1, 5) as reservation:
                with pytest.raises(ValueError):
                    h.engine.submit(replace(build_request(), stop=("\ud800",)), reservation)
                assert reservation.num_requests == 1
            assert h.engine.room.num_requests == 0
            check_complete(build_request(), await collect(h.engine.submit(build_request())))

        run(test)


class TestAbort:
    def test_in_decode(self) -> None:
        async def test(h: RemoteHarness) -> None:
            handle = h.engine.submit(build_request(max_tokens=50))
            got = list(await anext(handle))
            handle.abort()
            assert handle.finished
            async for batch in handle:
                got += batch
            assert got[-1].finish_reason == "abort"
            num_tokens = handle.num_tokens
            await until(lambda: any(record.finished for record in h.records))
            assert handle.num_tokens == num_tokens  # what came later was dropped
            (finished,) = (choice for record in h.records for choice in record.finished)
            assert (finished.finish_reason, finished.request_id) == ("abort", handle.request_id)

        run(test)

    def test_is_heard_at_once_also_if_the_other_side_hangs(self) -> None:
        async def test(h: RemoteHarness) -> None:
            await h.engine.refresh()
            thawed = threading.Event()
            h.process.loop.call_soon_threadsafe(thawed.wait)
            handle = h.engine.submit(build_request())
            handle.abort()
            assert (await collect(handle))[0][-1].finish_reason == "abort"
            with pytest.raises(ValueError, match="in use"):
                h.engine.submit(build_request())  # over there it still is
            thawed.set()
            await until(lambda: not h.engine._leaving)
            check_complete(build_request(), await collect(h.engine.submit(build_request())))

        run(test)

    def test_while_it_waits_and_during_a_step(self) -> None:
        async def test(h: RemoteHarness) -> None:
            gate = h.step.before_run = Gate()
            handles = [h.engine.submit(build_request(f"r{i}", n=2)) for i in range(2)]
            await gate.wait_entered()
            for handle in handles:
                handle.abort()
            gots = await asyncio.gather(*map(collect, handles))
            gate.open()
            assert {events[-1].finish_reason for got in gots for events in got.values()} == {"abort"}

        run(test, RemoteHarness(config=NARROW))

    def test_with_a_reason(self) -> None:
        async def test(h: RemoteHarness) -> None:
            handle = h.engine.submit(build_request(max_tokens=50))
            h.engine.abort(handle.request_id, "too late")
            got = await collect(handle)
            assert (got[0][-1].finish_reason, got[0][-1].error) == ("error", "too late")

        run(test)

    def test_of_a_reader_who_falls_behind(self) -> None:
        async def test(h: RemoteHarness) -> None:
            handle = h.engine.submit(build_request(max_tokens=50, num_speculative_tokens=0))
            await until(lambda: handle.finished)
            got = await collect(handle)
            assert got[0][-1].finish_reason == "error"
            assert "fell behind by more than 5 steps" in (got[0][-1].error or "")

        run(test, RemoteHarness(max_buffered_batches=5))
