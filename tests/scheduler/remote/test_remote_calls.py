"""What an engine in another process is asked beside requests, and how both sides end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from scheduler.errors import EngineUnhealthy, ShuttingDown
from scheduler.remote import engine as remote_engine
from scheduler.remote.engine import CallFailed
from tests.scheduler.builders import build_request
from tests.scheduler.engine_builders import Gate, check_complete, collect, until
from tests.scheduler.remote.builders import RemoteHarness, run


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

    @pytest.mark.parametrize("in_order", [True, False])
    def test_a_call_ends_with_the_engine_and_says_why(self, in_order: bool) -> None:
        async def main() -> None:
            h = RemoteHarness()
            h.process.host._functions = {"wait": lambda argument: asyncio.sleep(60)}
            h.engine.start()
            call = asyncio.create_task(h.engine.call("wait"))
            await until(lambda: bool(h.engine._calls))
            if in_order:
                assert await h.engine.shutdown(drain=True)
            else:
                h.process.hang_up()
            with pytest.raises(ShuttingDown if in_order else EngineUnhealthy):
                await call
            with pytest.raises(ShuttingDown if in_order else EngineUnhealthy):
                await h.engine.call("wait")
            await h.engine.shutdown(drain=False)

        asyncio.run(main())

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

    def test_who_waits_is_what_was_told_last_while_anybody_can_answer(self) -> None:
        async def test(h: RemoteHarness) -> None:
            assert h.engine.oldest_arrival is None
            h.engine.told = {"audit": None, "oldest_arrival": 12.5}
            assert h.engine.oldest_arrival == 12.5
            h.engine.give_up("planted")
            assert h.engine.oldest_arrival is None

        run(test)

    def test_the_block_map_is_that_of_the_other_side(self) -> None:
        async def test(h: RemoteHarness) -> None:
            request = build_request(prompt=range(1, 10))
            check_complete(request, await collect(h.engine.submit(request)))
            shown = await h.engine.block_map()
            assert len(shown) == h.bench.manager.num_blocks
            assert shown.count("c") == h.bench.manager.stats().cached_blocks > 0

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
