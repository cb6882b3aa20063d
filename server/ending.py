"""Signals while nothing is served yet: the start ends with one line, also where no default action would end it.

Process 1 of a container has no default action for SIGTERM, so ``docker stop`` would wait for its SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

TERMINATED_CODE = 128 + signal.SIGTERM  # 143, as shells count
INTERRUPTED_CODE = 1
GRACE_SECONDS = 5.0  # below the ten that ``docker stop`` waits

_ENDS = {signal.SIGTERM: ("ended by SIGTERM", TERMINATED_CODE), signal.SIGINT: ("interrupted", INTERRUPTED_CODE)}


class Ended(BaseException):
    """A signal, raised in the main thread wherever it is; no ``except Exception`` on the way keeps it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def ended_by_signals(
    report: Callable[[str], None], leaving: Callable[[], None] = lambda: None
) -> Iterator[Callable[[int], int]]:
    """Inside, SIGTERM and SIGINT raise :class:`Ended`. A second one ends the process at once, and so does the grace
    period if something keeps the first from doing so: a native call, another thread's download, code that swallows.
    In both cases ``leaving`` is called first: no ``finally`` runs any more, and children must not stay.

    Yields ``tell(number)``, which reports a signal's one line and returns its exit code. Once it was called the grace
    period outlives the block: at the interpreter's end, threads are waited for. A server's own handlers may replace
    these at any time.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield lambda number: _ENDS[signal.Signals(number)][1]
        return
    told = threading.Event()

    def tell(number: int) -> int:
        line, code = _ENDS[signal.Signals(number)]
        if not told.is_set():
            told.set()
            report(line)
        return code

    def leave(number: int, frame: FrameType | None = None) -> NoReturn:
        code = tell(number)
        try:
            leaving()
            if sys.stdout is not None:  # it was closed before the start
                sys.stdout.flush()
        finally:
            os._exit(code)

    def on_signal(number: int, frame: FrameType | None) -> NoReturn:
        for each in _ENDS:
            signal.signal(each, leave)
        raise Ended(number)

    # The interpreter writes a signal's number to this pipe at once, even while the main thread is in a native call.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while number := os.read(reading, 1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                time.sleep(GRACE_SECONDS)
                leave(number[0])
        os.close(reading)

    threading.Thread(target=watch, name="ended-by-signals", daemon=True).start()
    handlers = {number: signal.signal(number, on_signal) for number in _ENDS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield tell
    finally:
        if not told.is_set():
            signal.set_wakeup_fd(wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(writing)
