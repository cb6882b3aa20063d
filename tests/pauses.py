"""How long an event loop stands still while something else works."""

from __future__ import annotations

import asyncio
import time


async def pauses(working: asyncio.Future[object]) -> tuple[float, float]:
    """Until ``working`` is done: the longest time in which the loop did not run, and the time of it all."""
    began = last = time.perf_counter()
    longest = 0.0
    while not working.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest, last - began
