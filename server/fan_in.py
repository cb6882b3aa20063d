"""The events of several requests as one stream: a prompt list is one request for each prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from scheduler.handle import RequestHandle
from scheduler.request import ChoiceEvent

# Batches read ahead for all prompts together; what a slow reader leaves behind that stays in the bounded handles.
READ_AHEAD = 64


class FanIn:
    """Iterate once for the events of all handles, one tuple a step and request; ``abort`` whatever happens."""

    def __init__(self, handles: Sequence[RequestHandle]) -> None:
        self._handles = handles

    def abort(self) -> None:
        """End what has not ended. Safe to call at any time, and again."""
        for handle in self._handles:
            handle.abort()

    @property
    def finished(self) -> bool:
        """Every choice has had its last event, read or not."""
        return all(handle.finished for handle in self._handles)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices so far, read or not; final after ``abort``."""
        return sum(handle.num_tokens for handle in self._handles)

    async def events(self) -> AsyncIterator[tuple[ChoiceEvent, ...]]:
        if len(self._handles) == 1:
            async for batch in self._handles[0]:
                yield batch
            return
        queue: asyncio.Queue[tuple[ChoiceEvent, ...] | None] = asyncio.Queue(READ_AHEAD)

        async def read(handle: RequestHandle) -> None:
            async for batch in handle:
                await queue.put(batch)
            await queue.put(None)

        readers = [asyncio.create_task(read(handle)) for handle in self._handles]
        try:
            ended = 0
            while ended < len(readers):
                arrived = await queue.get()
                if arrived is None:
                    ended += 1
                else:
                    yield arrived
        finally:
            for reader in readers:
                reader.cancel()
