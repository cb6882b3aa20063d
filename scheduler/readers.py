"""Who reads the events of the requests that are open, and how events get there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler.handle import RequestHandle
from scheduler.request import ChoiceEvent, EngineRequest


class MakeHandle(Protocol):
    """Makes the handle of a request from its id, the indices of its choices, the bound of its buffer, and its abort."""

    def __call__(
        self, request_id: str, indices: tuple[int, ...], limit: int, abort: Callable[[], None]
    ) -> RequestHandle: ...


class Readers:
    """The handles of open requests. ``abort(request_id, error)`` ends one; its events come by ``hand_out``."""

    def __init__(
        self,
        abort: Callable[[str, str | None], None],
        max_buffered_batches: int,
        make_handle: MakeHandle = RequestHandle,
    ) -> None:
        self._abort = abort
        self._max_buffered = max_buffered_batches
        self._make_handle = make_handle
        self._handles: dict[str, RequestHandle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._handles

    def open(self, request: EngineRequest) -> RequestHandle:
        """The handle of a request that was taken."""
        request_id = request.request_id
        indices = tuple(spec.index for spec in request.choices)
        handle = self._make_handle(request_id, indices, self._max_buffered, lambda: self._abort(request_id, None))
        self._handles[request_id] = handle
        return handle

    def hand_out(self, events: Sequence[ChoiceEvent]) -> None:
        """One batch for each request, in the order of the events. Who fell behind too far is aborted."""
        batches: dict[str, list[ChoiceEvent]] = {}
        for event in events:
            batches.setdefault(event.request_id, []).append(event)
        for request_id, batch in batches.items():
            handle = self._handles.get(request_id)
            if handle is None:
                continue
            handle.put(tuple(batch))
            if handle.finished:
                del self._handles[request_id]
            elif handle.overfull:
                self._abort(request_id, f"the reader fell behind by more than {self._max_buffered} steps")

    def end(self, request_id: str, error: str | None = None) -> list[int]:
        """End a request's open choices without the engine, as aborted or with an error; returns their indices."""
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return []
        indices, reason = handle.open_indices, "abort" if error is None else "error"
        handle.put(tuple(ChoiceEvent(request_id, index, finish_reason=reason, error=error) for index in indices))
        return indices

    def fail(self, reason: str) -> None:
        """End every open choice with an error: nothing else will come."""
        for request_id in list(self._handles):
            self.end(request_id, reason)
