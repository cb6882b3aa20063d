"""What a failed, silent or slow process of an engine is to those who wait for it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnhealthy
from scheduler.remote.engine import SILENCE_SECONDS
from scheduler.remote.messages import Abort, Answer, encode, frame
from specdec.plan import StepPlan
from tests.scheduler.builders import build_request
from tests.scheduler.engine_builders import Gate, check_complete, collect, until
from tests.scheduler.remote.builders import RemoteHarness, run


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
