"""Ends a process that cannot end by itself: from a thread of its own, as what it watches may be the event loop.

Three things watch each other:

- the event loop looks after the engine, and gives up an engine whose step does not end (server.run)
- this thread looks after the event loop, by its heartbeat, and after an end that takes too long
- the runtime's own timer (faulthandler) looks after this thread: a call that never lets go of the interpreter stops all
  of them, but not that timer
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable


class Watchdog:
    """Calls ``on_frozen(reason)`` once, in its thread, when the event loop has not beaten for ``limit`` seconds or an
    end has taken too long.

    ``on_tick`` is called at the start and every ``every`` seconds, as long as nothing is wrong. Its methods may be
    called from any thread.
    """

    def __init__(
        self,
        *,
        limit: float,
        on_frozen: Callable[[str], None],
        on_tick: Callable[[], None] = lambda: None,
        every: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._on_frozen = on_frozen
        self._on_tick = on_tick
        self._every = every
        self._clock = clock
        self._beat = clock()
        self._deadline: float | None = None
        self._looping = True
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._on_tick()  # here, as the thread may never come to it
        self._thread.start()

    def stop(self) -> None:
        """No call follows. Not from its own thread."""
        self._stopped.set()
        with contextlib.suppress(RuntimeError):  # it was never started
            self._thread.join()

    def beat(self) -> None:
        """The event loop goes round."""
        self._beat = self._clock()

    def loop_ended(self) -> None:
        """No beat is to be expected any more."""
        self._looping = False

    def end_within(self, seconds: float) -> None:
        """The process has begun to end, and should be done by then. The earliest of several such times counts."""
        deadline = self._clock() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    @property
    def reason(self) -> str | None:
        """What is wrong now; None if nothing is."""
        now = self._clock()
        if self._looping and now - self._beat > self._limit:
            return f"the event loop has not gone round for {self._limit:g} seconds"
        if self._deadline is not None and now > self._deadline:
            return "the end takes too long"
        return None

    def _watch(self) -> None:
        while not self._stopped.wait(self._every):
            reason = self.reason
            if reason is not None:
                self._on_frozen(reason)
                return
            self._on_tick()
