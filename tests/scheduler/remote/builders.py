"""A remote engine whose other side is a thread with an event loop of its own: everything but the process is real."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from scheduler.config import SchedulerConfig
from scheduler.remote.engine import TELL, Capacity, RemoteEngine
from scheduler.remote.host import EngineHost
from scheduler.stats import StepRecord
from tests.scheduler.builders import Bench


class ThreadProcess:
    """Stands for the engine's process (scheduler.remote.engine.EngineProcess)."""

    def __init__(self, bench: Bench) -> None:
        self.sock, self._theirs = socket.socketpair()
        self.calls: list[str] = []
        self.killed = False
        self.stubborn = False  # does not end by itself
        self.in_order: bool | None = None  # what the host's run returned
        self.host: EngineHost
        self.loop: asyncio.AbstractEventLoop
        self._bench = bench
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _main(self) -> None:
        self.host = EngineHost(self._bench.scheduler, self._bench.step, {TELL: self._tell, "fail": self._fail})
        self.loop = asyncio.get_running_loop()
        self._started.set()
        self.in_order = await self.host.run(self._theirs)
        await self.host.engine.shutdown(drain=False)  # a process would just end

    async def _tell(self, argument: str) -> dict[str, Any]:
        self.calls.append(argument)
        return {"audit": None, "number": len(self.calls)}

    async def _fail(self, argument: str) -> None:
        raise ValueError(f"planted {argument}\nsecond line")

    def do(self, function: Callable[[], object]) -> None:
        """In the host's loop; waits for it."""
        done = threading.Event()

        def work() -> None:
            try:
                function()
            finally:
                done.set()

        self.loop.call_soon_threadsafe(work)
        assert done.wait(30)

    def send_raw(self, data: bytes) -> None:
        """Bytes that the server gets from this side."""
        self.do(lambda: self.host._transport.write(data))  # type: ignore[union-attr]

    def hang_up(self) -> None:
        """As a process does that ends without a word."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.do(lambda: self.host._transport and self.host._transport.abort())

    # --- EngineProcess ---

    def wait(self, timeout: float) -> int | None:
        if self.stubborn and not self.killed:
            time.sleep(min(timeout, 0.05))
            return None
        self._thread.join(timeout)
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        self.killed = True
        self.hang_up()

    def dump_stacks(self) -> None:
        self.calls.append("stacks")


class RemoteHarness:
    def __init__(self, *, config: SchedulerConfig | None = None, **options: Any) -> None:
        self.bench = Bench(config=config)
        self.step = self.bench.step
        self.records: list[StepRecord] = []
        self.process = ThreadProcess(self.bench)
        self.engine = RemoteEngine(
            self.process.sock,
            self.process,
            self.bench.config,
            Capacity(self.bench.manager.num_blocks, self.bench.manager.block_size),
            on_step=self.records.append,
            **options,
        )


def run(test: Callable[[RemoteHarness], Awaitable[None]], harness: RemoteHarness | None = None) -> RemoteHarness:
    """Run ``test`` against a started engine; afterwards everything must be free on the other side."""

    async def main() -> RemoteHarness:
        h = harness or RemoteHarness()
        h.engine.start()
        try:
            await asyncio.wait_for(test(h), timeout=60)
        finally:
            await h.engine.shutdown(drain=True, timeout=30)
        h.bench.check_all_free()
        h.bench.scheduler.check_integrity()
        return h

    return asyncio.run(main())
