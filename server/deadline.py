"""When a request has to be over, counted from its arrival, wherever it is by then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from server.errors import APIError


class Deadline:
    """``seconds`` after ``arrival_time``. Within ``bound`` the work of a request is cancelled there; ``call`` is for
    work that goes on elsewhere. ``count`` hears once of a request that ran out of time.

    For the event loop's thread. Times are time.monotonic() seconds.
    """

    def __init__(self, arrival_time: float, seconds: float, count: Callable[[], None] = lambda: None) -> None:
        self._at = arrival_time + seconds
        self._seconds = seconds
        self._count = count
        self._counted = False

    @property
    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self._at - time.monotonic()

    @asynccontextmanager
    async def bound(self) -> AsyncIterator[None]:
        """Raises APIError 504 at the deadline, in place of what is awaited inside."""
        if self.left <= 0:
            raise self.passed()
        timer = asyncio.timeout(self.left)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise self.passed() from None

    def call_at_end(self, function: Callable[[], None]) -> asyncio.TimerHandle:
        """Call it at the deadline, unless the handle is cancelled before."""
        return asyncio.get_running_loop().call_later(max(0.0, self.left), function)

    def passed(self) -> APIError:
        """The answer to a request that did not end in time; counts it."""
        if not self._counted:
            self._counted = True
            self._count()
        return APIError(504, f"the request did not end within its timeout of {self._seconds:g} seconds")


def bound(deadline: Deadline | None) -> AbstractAsyncContextManager[None]:
    """``deadline.bound``, if there is one."""
    return nullcontext() if deadline is None else deadline.bound()
