"""The event loop watched from within: how late it comes back to a task that wants to run every millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass

INTERVAL = 0.001  # seconds


@dataclass(frozen=True, slots=True)
class Lag:
    """Milliseconds that the loop came late, over ``wakes`` times at which it should have come."""

    wakes: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class LoopProbe:
    """Runs in the loop that it watches."""

    def __init__(self) -> None:
        self._late = array("d")

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch until the block ends; what was seen before is forgotten."""
        self._late = array("d")
        watch = asyncio.create_task(self._watch())
        await asyncio.sleep(0)  # so that it has begun
        try:
            yield
            await asyncio.sleep(INTERVAL)  # a pause that has just ended is seen, too
        finally:
            watch.cancel()

    @property
    def lag(self) -> Lag:
        late = sorted(self._late)
        if not late:
            return Lag(0, 0.0, 0.0, 0.0)
        p50, p99, most = (round(1000 * late[int(share * (len(late) - 1))], 3) for share in (0.5, 0.99, 1.0))
        return Lag(len(late), p50, p99, most)

    async def _watch(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(INTERVAL)
            now = time.perf_counter()
            self._late.append(max(0.0, now - last - INTERVAL))
            last = now
