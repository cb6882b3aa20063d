"""The client's event loop in a thread of its own that gives way to the server's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_SLICE_SECONDS = 0.2  # a signal's handler runs between two of them
_LEAVE_SECONDS = 5.0


class ClientThread:
    """Runs coroutines one after the other on one event loop. ``nice`` is added to the thread's own niceness (Linux
    keeps one for each thread), so children that the process starts elsewhere are not niced. ``niced`` says whether it
    worked."""

    def __init__(self, nice: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._nice = nice
        self.niced = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> ClientThread:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LEAVE_SECONDS)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises. A signal that raises here cancels it first."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                with contextlib.suppress(FutureTimeout):
                    return future.result(_SLICE_SECONDS)
                if future.done():  # it raised a TimeoutError of its own
                    return future.result()
        except BaseException:
            future.cancel()
            with contextlib.suppress(BaseException):
                future.result(_LEAVE_SECONDS)
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._nice and sys.platform == "linux":
            with contextlib.suppress(OSError):
                number = threading.get_native_id()
                os.setpriority(os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, number) + self._nice)
                self.niced = True
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(asyncio.sleep(0))  # sockets that were given up close in the next turn
            self._loop.close()
