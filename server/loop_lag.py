"""The event loop watched from within: how late it comes to a task that wants to run now and then."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

EVERY = 0.05  # seconds


@contextlib.asynccontextmanager
async def watching(observe: Callable[[float], None], *, every: float = EVERY) -> AsyncIterator[None]:
    """While the block runs, ``observe`` hears each time by how many seconds the running loop came too late."""

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + every
            await asyncio.sleep(every)
            observe(max(0.0, loop.time() - due))

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
