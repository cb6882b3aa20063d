"""Follows the requests that are to be traced: from their arrival until the response and every choice have ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol

from scheduler.stats import StepRecord
from server.tracing.parent import TraceParent
from server.tracing.trace import RequestTrace, new_span_id, new_trace_id

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}  # what is traced, by its path
UNAUTHORIZED = 401  # of strangers nothing is told
TRACE_RESULTS = ("sent", "unsampled", "queue_full", "export_failed")  # what became of a trace
GRACE_SECONDS = 5.0  # from a response's end to that of its choices: those of a client who left, mostly


class Sink(Protocol):
    """Where a trace goes when it is over."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Traces by what became of them, TRACE_RESULTS; safe in any thread."""

    def put(self, trace: RequestTrace) -> None:
        """Take it, or drop it; never blocks."""

    def close(self) -> None:
        """Send what waits, within seconds; drop the rest. Blocks."""


class Tracing:
    """For the event loop's thread. Nothing here happens in a step: choices are told by the records of their ends.

    A response may end before its choices do (the client left), and these may end unheard (the engine died): then the
    trace is handed on after ``GRACE_SECONDS`` with what is known.
    """

    def __init__(self, sink: Sink, *, grace_seconds: float = GRACE_SECONDS) -> None:
        self._sink = sink
        self._grace_seconds = grace_seconds
        self._following: dict[str, RequestTrace] = {}  # by the ids of the engine's requests

    @property
    def counts(self) -> Mapping[str, int]:
        """Traces by what became of them, TRACE_RESULTS."""
        return self._sink.counts

    def begin(
        self, method: str, path: str, request_id: str, arrival_time: float, parent: TraceParent | None
    ) -> RequestTrace | None:
        """The trace of a request that has arrived; None if such requests are not traced."""
        operation = OPERATIONS.get(path)
        if operation is None or method != "POST":
            return None
        return RequestTrace(
            operation=operation,
            route=path,
            request_id=request_id,
            arrival_time=arrival_time,
            parent=parent,
            trace_id=new_trace_id() if parent is None else parent.trace_id,
            span_id=new_span_id(),
            on_queued=self._follow,
        )

    def observe(self, record: StepRecord) -> None:
        """Take the ends of choices from one record of the engine."""
        for finished in record.finished:
            trace = self._following.get(finished.request_id)
            if trace is None:
                continue
            trace.finished.append(finished)
            if finished.last_of_request:
                del self._following[finished.request_id]
                trace.open_ids.discard(finished.request_id)
                self._hand_on_if_over(trace)

    def ended(self, trace: RequestTrace, *, status: int, complete: bool, key: str | None) -> None:
        """The response has ended. ``complete``: all of it was sent."""
        trace.status, trace.complete, trace.key = status, complete, key
        trace.end_time = time.monotonic()
        if status == UNAUTHORIZED:
            return
        self._hand_on_if_over(trace)
        if trace.open_ids:
            asyncio.get_running_loop().call_later(self._grace_seconds, self._give_up, trace)

    def close(self) -> None:
        """Hand on what has ended, and send it; blocks for seconds at most. For any thread, once nothing is served."""
        for trace in {id(trace): trace for trace in self._following.values()}.values():
            self._give_up(trace)
        self._sink.close()

    def _follow(self, trace: RequestTrace) -> None:
        for engine_id in trace.open_ids:
            self._following[engine_id] = trace

    def _give_up(self, trace: RequestTrace) -> None:
        for engine_id in trace.open_ids:
            self._following.pop(engine_id, None)
        if trace.open_ids:
            trace.open_ids.clear()
            self._hand_on_if_over(trace)

    def _hand_on_if_over(self, trace: RequestTrace) -> None:
        if trace.end_time is not None and not trace.open_ids:
            trace.on_queued = None
            self._sink.put(trace)
