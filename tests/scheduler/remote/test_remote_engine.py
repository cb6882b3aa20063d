"""An engine at the other end of a socket is an engine: what it is asked, what it answers, and how either side ends."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnhealthy, QueueFull, RequestTooLarge, ShuttingDown
from scheduler.remote import engine as remote_engine
from scheduler.remote.engine import SILENCE_SECONDS, CallFailed
from scheduler.remote.messages import Abort, Answer, encode, frame
from scheduler.request import ChoiceEvent, EngineRequest
from specdec.plan import StepPlan
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


class TestFailure:
    def test_a_step_that_raises_fails_its_requests_with_the_same_words_and_the_engine_goes_on(self) -> None:
        async def test(h: RemoteHarness) -> None:
            def fail(plan: StepPlan) -> None:
                raise MemoryError("0xdeadbeef in /secret/path")

            h.step.before_run = fail
            got = await collect(h.engine.submit(build_request("a", n=2)))
            assert [events[-1].error for events in got.values()] == ["the model step failed (MemoryError)"] * 2
            h.step.before_run = lambda plan: None
            check_complete(build_request("b"), await collect(h.engine.submit(build_request("b"))))
            assert h.engine.healthy

        run(test)

    def test_an_engine_that_keeps_failing_is_unhealthy_here_too(self) -> None:
        async def main() -> None:
            h = RemoteHarness(config=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64))

            def fail(plan: StepPlan) -> None:
                raise RuntimeError

            h.step.before_run = fail
            h.engine.start()
            handles = [h.engine.submit(build_request(f"r{i}")) for i in range(5)]
            gots = await asyncio.gather(*map(collect, handles))
            assert [got[0][-1].finish_reason for got in gots] == ["error"] * 5
            await until(lambda: not h.engine.healthy)
            assert "3 steps in a row failed" in (h.engine.unhealthy_reason or "")
            with pytest.raises(EngineUnhealthy, match="3 steps"):
                h.engine.submit(build_request("late"))
            assert not await h.engine.shutdown()
            assert h.process.killed  # nobody else would end it

        asyncio.run(main())

    @pytest.mark.parametrize(
        "how", [frame(b"nonsense"), b"\xff\xff\xff\xff", frame(Abort.__name__.encode()), None], ids=str
    )
    def test_a_process_that_hangs_up_or_talks_nonsense_fails_everything(self, how: bytes | None) -> None:
        async def main() -> None:
            h = RemoteHarness()
            gate = h.step.before_run = Gate()
            h.engine.start()
            handles = [h.engine.submit(build_request(f"r{i}", n=2)) for i in range(3)]
            call = asyncio.create_task(h.engine.call("tell"))
            await call
            await gate.wait_entered()
            if how is None:
                await asyncio.to_thread(h.process.hang_up)
            else:
                await asyncio.to_thread(h.process.send_raw, how)
            gots = await asyncio.gather(*map(collect, handles))
            assert {event[-1].finish_reason for got in gots for event in got.values()} == {"error"}
            assert "the engine's process" in (h.engine.unhealthy_reason or "")
            assert h.engine.room.num_requests == 0
            assert h.engine.seconds_since_progress == 0.0
            for refused in (lambda: h.engine.submit(build_request("late")), lambda: h.engine.reserve(1, 1)):
                with pytest.raises(EngineUnhealthy, match="the engine's process"):
                    refused()
            with pytest.raises(EngineUnhealthy):
                await h.engine.call("tell")
            gate.open()
            assert not await h.engine.shutdown()

        asyncio.run(main())

    def test_results_that_cannot_be_sent_fail_everything_rather_than_be_waited_for(self) -> None:
        async def main() -> None:
            h = RemoteHarness()

            class Surrogate:
                def push(self, token_ids: Any, is_last: bool) -> Any:
                    from scheduler.request import TextDecision

                    return TextDecision(len(token_ids), "\ud800")

            h.bench.scheduler._text_filters = lambda request, index: Surrogate()
            h.engine.start()
            got = await collect(h.engine.submit(build_request()))
            assert got[0][-1].finish_reason == "error"
            assert h.engine.unhealthy_reason == "the engine's results could not be sent"
            await h.engine.shutdown()

        asyncio.run(main())

    def test_an_engine_that_is_given_up_fails_everything_at_once(self) -> None:
        async def main() -> None:
            h = RemoteHarness()
            gate = h.step.before_run = Gate()
            h.engine.start()
            handle = h.engine.submit(build_request())
            await gate.wait_entered()
            h.engine.give_up("no step has ended for long")
            assert (await collect(handle))[0][-1].error == "no step has ended for long"
            assert h.engine.unhealthy_reason == "no step has ended for long"
            gate.open()
            await h.engine.shutdown()
            assert h.process.killed

        asyncio.run(main())

    def test_a_failing_observer_does_not_stop_the_service(self) -> None:
        async def test(h: RemoteHarness) -> None:
            def broken(record: object) -> None:
                raise KeyError("planted")

            h.engine.on_step = broken
            check_complete(build_request(), await collect(h.engine.submit(build_request())))

        run(test)


class TestProgress:
    def test_a_process_that_says_nothing_makes_no_progress_busy_or_idle(self) -> None:
        now = 0.0
        harness = RemoteHarness(clock=lambda: now)

        async def test(h: RemoteHarness) -> None:
            nonlocal now
            await collect(h.engine.submit(build_request()))
            await until(lambda: h.engine._status.idle)
            assert h.engine.seconds_since_progress == 0.0
            frozen, thawed = threading.Event(), threading.Event()

            def freeze() -> None:
                frozen.set()
                assert thawed.wait(30)

            h.process.loop.call_soon_threadsafe(freeze)
            await asyncio.to_thread(frozen.wait, 30)
            await asyncio.sleep(0.05)  # what was sent before arrives
            now += SILENCE_SECONDS / 2
            assert h.engine.seconds_since_progress == 0.0  # a heartbeat may be late
            handle = h.engine.submit(build_request("b"))
            now += 1.0
            assert h.engine.seconds_since_progress == 1.0  # since there was something to do
            now += 1000.0
            assert h.engine.seconds_since_progress == 1001.0
            thawed.set()
            check_complete(build_request("b"), await collect(handle))
            await until(lambda: h.engine.seconds_since_progress == 0.0)
            now += 2 * SILENCE_SECONDS
            assert h.engine.seconds_since_progress > SILENCE_SECONDS
            await until(lambda: h.engine.seconds_since_progress == 0.0)  # it was only the clock: it beats

        run(test, harness)

    def test_a_step_that_hangs_is_seen(self) -> None:
        async def test(h: RemoteHarness) -> None:
            gate = h.step.before_run = Gate()
            handle = h.engine.submit(build_request())
            await gate.wait_entered()
            await until(lambda: h.engine.seconds_since_progress > 0.6)  # beats go on and say so
            gate.open()
            await collect(handle)
            await until(lambda: h.engine.seconds_since_progress == 0.0)

        run(test)

    def test_no_step_begins_while_the_server_does_not_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("scheduler.remote.host.MAX_UNSENT_BYTES", 1)
        ran: list[StepPlan] = []

        async def test(h: RemoteHarness) -> None:
            h.step.before_run = ran.append
            await h.engine.refresh()
            connection = h.engine._transport
            assert connection is not None
            connection.pause_reading()  # type: ignore[attr-defined]
            await asyncio.to_thread(h.process.send_raw, encode(Answer(0, "x" * 2**22, None)))  # fills the socket
            await until(lambda: not h.process.host._flowing.is_set())
            request = build_request(max_tokens=20)
            handle = h.engine.submit(request)
            await until(lambda: h.process.host.engine.seconds_since_progress > 0.1)
            assert not ran
            connection.resume_reading()  # type: ignore[attr-defined]
            check_complete(request, await collect(handle))
            assert ran

        run(test)


class TestCalls:
    def test_a_call_is_answered_or_fails_with_the_reason(self) -> None:
        async def test(h: RemoteHarness) -> None:
            assert await h.engine.call("tell", "me") == {"audit": None, "number": 1}
            with pytest.raises(CallFailed, match=r"ValueError: planted x$"):
                await h.engine.call("fail", "x")
            with pytest.raises(CallFailed, match="KeyError"):
                await h.engine.call("unknown")
            assert h.engine.healthy
            assert not h.engine._calls

        run(test)

    def test_refreshing_tells_how_it_stands_and_never_waits_for_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote_engine, "REFRESH_SECONDS", 0.05)

        async def test(h: RemoteHarness) -> None:
            monkeypatch.setattr(remote_engine, "REFRESH_SECONDS", 30)
            await h.engine.refresh()
            assert h.engine.told == {"audit": None, "number": 1}
            assert h.engine.audit_status is None
            monkeypatch.setattr(remote_engine, "REFRESH_SECONDS", 0.05)
            thawed = threading.Event()
            h.process.loop.call_soon_threadsafe(thawed.wait)
            await h.engine.refresh()
            assert h.engine.told == {"audit": None, "number": 1}
            thawed.set()
            await h.engine.call("tell")
            assert not h.engine._calls

        run(test)

    def test_the_stacks_of_both_sides_are_dumped(self, capfd: pytest.CaptureFixture[str]) -> None:
        async def test(h: RemoteHarness) -> None:
            h.engine.dump_stacks()
            assert "stacks" in h.process.calls

        run(test)
        assert "most recent call first" in capfd.readouterr().err


class TestShutdown:
    def test_drain_finishes_what_runs_and_refuses_what_comes(self) -> None:
        async def main() -> None:
            h = RemoteHarness()
            h.engine.start()
            request = build_request(max_tokens=30)
            handle = h.engine.submit(request)
            closing = asyncio.create_task(h.engine.shutdown(drain=True, timeout=60))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown):
                h.engine.submit(build_request("late"))
            assert not h.engine.accepting
            assert await closing
            check_complete(request, await collect(handle))
            assert h.process.in_order is True
            assert not h.process.killed
            h.bench.check_all_free()
            assert await h.engine.shutdown(drain=False)  # again, as an application's lifespan does

        asyncio.run(main())

    def test_without_drain_the_rest_is_aborted(self) -> None:
        async def main() -> None:
            h = RemoteHarness()
            h.engine.start()
            handle = h.engine.submit(build_request(max_tokens=50))
            await anext(handle)
            assert not await h.engine.shutdown(drain=False)
            got = await collect(handle)
            assert got[0][-1].finish_reason == "abort"
            h.bench.check_all_free()

        asyncio.run(main())

    def test_a_process_that_does_not_end_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote_engine, "LAST_SECONDS", 0.1)

        async def main() -> None:
            h = RemoteHarness()
            gate = h.step.before_run = Gate()
            h.process.stubborn = True
            h.engine.start()
            handle = h.engine.submit(build_request())
            await gate.wait_entered()
            closing = asyncio.create_task(h.engine.shutdown(drain=False, grace=0.05))
            assert not await closing
            assert h.process.killed
            assert handle.finished
            gate.open()

        asyncio.run(main())

    def test_an_engine_that_was_never_started_takes_its_process_with_it(self) -> None:
        async def main() -> None:
            h = RemoteHarness()
            assert await h.engine.shutdown()
            assert h.process.killed

        asyncio.run(main())

    def test_the_host_ends_when_the_server_hangs_up(self) -> None:
        async def main() -> None:
            h = RemoteHarness()
            h.engine.start()
            handle = h.engine.submit(build_request(max_tokens=50))
            await anext(handle)
            assert h.engine._transport is not None
            h.engine._transport.abort()
            await asyncio.to_thread(h.process._thread.join, 30)
            assert h.process.in_order is False
            assert "has ended" in (h.engine.unhealthy_reason or "")

        asyncio.run(main())
