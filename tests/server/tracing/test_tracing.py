"""A trace is handed on once, when the response and every choice have ended, in whatever order they do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from server.tracing.parent import TraceParent
from server.tracing.trace import RequestTrace
from server.tracing.tracing import Tracing
from tests.server.tracing.builders import finished, record

PARENT = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1)


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.traces: list[RequestTrace] = []
        self.closed = False
        self.counts: Mapping[str, int] = {}

    def put(self, trace: RequestTrace) -> None:
        self.traces.append(trace)

    def close(self) -> None:
        self.closed = True


def begun(tracing: Tracing, *engine_ids: str, **changes: Any) -> RequestTrace:
    """A request that was queued as these."""
    fields = {"method": "POST", "path": "/v1/completions", "request_id": "r", "arrival_time": 1.0, "parent": None}
    trace = tracing.begin(**{**fields, **changes})
    assert trace is not None
    if engine_ids:
        trace.queued(engine_ids, "tiny", 3, {})
    return trace


def test_the_choices_may_end_first() -> None:
    tracing = Tracing(sink := Kept())
    trace = begun(tracing, "a")
    tracing.observe(record(finished("a")))
    assert sink.traces == []
    tracing.ended(trace, status=200, complete=True, key=None)
    assert sink.traces == [trace]
    assert (trace.status, trace.complete, len(trace.finished)) == (200, True, 1)


def test_the_response_may_end_first() -> None:
    async def run() -> None:
        tracing = Tracing(sink := Kept())
        trace = begun(tracing, "a", "b")
        tracing.ended(trace, status=200, complete=False, key=None)
        tracing.observe(record(finished("a", 0, last_of_request=False), finished("b", 2)))
        assert sink.traces == []
        tracing.observe(record(finished("a", 1, finish_reason="abort")))
        assert sink.traces == [trace]
        assert sorted(each.index for each in trace.finished) == [0, 1, 2]

    asyncio.run(run())


def test_a_request_that_was_never_queued_is_handed_on_with_its_response() -> None:
    tracing = Tracing(sink := Kept())
    trace = begun(tracing)
    tracing.ended(trace, status=400, complete=True, key="alice")
    assert sink.traces == [trace]
    assert trace.key == "alice"


def test_choices_that_are_never_heard_of_again_hold_nothing_up() -> None:
    async def run() -> None:
        tracing = Tracing(sink := Kept(), grace_seconds=0.0)
        trace = begun(tracing, "a", "b")
        tracing.observe(record(finished("a")))
        tracing.ended(trace, status=200, complete=False, key=None)
        await asyncio.sleep(0.01)
        assert sink.traces == [trace]
        tracing.observe(record(finished("b")))  # late
        assert sink.traces == [trace]
        assert [each.request_id for each in trace.finished] == ["a"]

    asyncio.run(run())


def test_when_the_choices_do_end_in_time_it_is_handed_on_once() -> None:
    async def run() -> None:
        tracing = Tracing(sink := Kept(), grace_seconds=0.0)
        trace = begun(tracing, "a")
        tracing.ended(trace, status=200, complete=False, key=None)
        tracing.observe(record(finished("a")))
        await asyncio.sleep(0.01)
        assert sink.traces == [trace]

    asyncio.run(run())


def test_ends_of_requests_that_are_not_traced_are_nobodys() -> None:
    tracing = Tracing(sink := Kept())
    tracing.observe(record(finished("someone")))
    assert sink.traces == []


def test_strangers_leave_no_traces() -> None:
    tracing = Tracing(sink := Kept())
    tracing.ended(begun(tracing), status=401, complete=True, key=None)
    assert sink.traces == []


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/completions"), ("POST", "/tokenize"), ("GET", "/health"), ("POST", "/v1/")]
)
def test_only_what_generates_is_traced(method: str, path: str) -> None:
    assert Tracing(Kept()).begin(method, path, "r", 1.0, PARENT) is None


def test_a_trace_goes_on_in_its_parents_and_else_is_new() -> None:
    tracing = Tracing(Kept())
    child, first, second = begun(tracing, parent=PARENT), begun(tracing), begun(tracing)
    assert child.trace_id == PARENT.trace_id
    assert len({PARENT.span_id, child.span_id, first.span_id, second.span_id}) == 4
    assert len({PARENT.trace_id, first.trace_id, second.trace_id}) == 3


def test_closing_hands_on_what_has_ended_and_closes_the_sink() -> None:
    async def run() -> None:
        tracing = Tracing(sink := Kept())
        trace = begun(tracing, "a", "b")
        tracing.ended(trace, status=200, complete=False, key=None)
        begun(tracing, "c")  # its response has not ended
        tracing.close()
        assert sink.traces == [trace]
        assert sink.closed

    asyncio.run(run())
