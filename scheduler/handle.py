"""What a submitter holds of its request: the events, and the right to abort."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from scheduler.request import ChoiceEvent


class RequestHandle:
    """Iterate over it for the events of the request, one tuple a step; the iteration ends with its last choice.

    Use it as ``async with`` so that leaving early aborts the request. The buffer is bounded: the engine aborts a
    request whose reader falls behind by more than that, and the reader finds an error as its last events.
    """

    def __init__(self, request_id: str, indices: Iterable[int], limit: int, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.num_tokens = 0  # committed output tokens of all choices, read or not; final once it is finished
        self._open = set(indices)
        self._limit = limit
        self._abort = abort
        self._batches: deque[tuple[ChoiceEvent, ...]] = deque()
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Every choice has had its last event, read or not."""
        return not self._open

    @property
    def open_indices(self) -> list[int]:
        """Choices that have not had their last event."""
        return sorted(self._open)

    @property
    def overfull(self) -> bool:
        """The reader fell behind by more than the bound."""
        return len(self._batches) > self._limit

    def put(self, batch: tuple[ChoiceEvent, ...]) -> None:
        """For the engine: never blocks."""
        self._batches.append(batch)
        self.num_tokens += sum(len(event.token_ids) for event in batch)
        self._open.difference_update(event.index for event in batch if event.finish_reason is not None)
        self._arrived.set()

    def abort(self) -> None:
        """End the request; unread events stay readable, the last ones say "abort". A finished one stays as it is."""
        if not self.finished:
            self._abort()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> tuple[ChoiceEvent, ...]:
        while not self._batches:
            if self.finished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._batches.popleft()

    async def __aenter__(self) -> RequestHandle:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()
