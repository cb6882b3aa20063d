"""From the trace of a request to OpenTelemetry's spans. Imports the SDK: only for a server that sends traces.

One span of kind SERVER for the request, and for each of its choices what the metrics call its three parts::

    chat SmolLM2-135M-Instruct    arrival .......................................... end of the response
      queue                       arrival .. first scheduled
      prefill                                first scheduled .. first token
      decode                                                    first token ...... last token
"""

from __future__ import annotations

import os
import time
import uuid

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from server.tracing.attributes import first_choices, phases, problem_of, request_attributes, span_name
from server.tracing.parent import TraceParent
from server.tracing.trace import RequestTrace
from server.version import VERSION

SERVICE = "truedraft"


class SpanMaker:
    """Makes the spans of one trace after the other; for one thread."""

    def __init__(self) -> None:
        self._ids = _GivenIds()
        self._ended = _Ended()
        # The sampler is the one that OTEL_TRACES_SAMPLER names; by default the parent decides, and without one all
        # requests are traced.
        provider = TracerProvider(resource=_resource(), id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(SERVICE, VERSION)

    def spans(self, trace: RequestTrace) -> list[ReadableSpan]:
        """The request's span last; empty if the trace is not sampled."""
        assert trace.end_time is not None, "the response has not ended"
        now_seconds, now = time.monotonic(), time.time_ns()

        def at(seconds: float) -> int:
            """Nanoseconds since the epoch."""
            return now - round((now_seconds - seconds) * 1e9)

        self._ids.next_ids = (int(trace.trace_id, 16), int(trace.span_id, 16))
        root = self._tracer.start_span(
            span_name(trace),
            context=_context(trace.parent),
            kind=SpanKind.SERVER,
            attributes=request_attributes(trace),
            start_time=at(trace.arrival_time),
        )
        if root.is_recording():
            if (problem := problem_of(trace)) is not None:
                root.set_status(Status(StatusCode.ERROR, problem))
            inside = set_span_in_context(root, Context())
            for finished in first_choices(trace):
                for name, begin, end, attributes in phases(finished):
                    span = self._tracer.start_span(name, inside, attributes=attributes, start_time=at(begin))
                    span.end(at(end))
        root.end(at(trace.end_time))
        return self._ended.take()


class _Ended(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


class _GivenIds(IdGenerator):
    """Of a request's span the ids that its log lines have had since it arrived; of all others random ones."""

    def __init__(self) -> None:
        self.next_ids: tuple[int, int] | None = None  # of the trace and of its first span
        self._random = RandomIdGenerator()

    def generate_trace_id(self) -> int:
        return self._random.generate_trace_id() if self.next_ids is None else self.next_ids[0]

    def generate_span_id(self) -> int:
        given, self.next_ids = self.next_ids, None
        return self._random.generate_span_id() if given is None else given[1]

    def is_trace_id_random(self) -> bool:
        return True


def _context(parent: TraceParent | None) -> Context:
    if parent is None:
        return Context()
    context = SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(parent.flags),
        trace_state=TraceState.from_header([parent.state]) if parent.state else None,
    )
    return set_span_in_context(NonRecordingSpan(context), Context())


def _resource() -> Resource:
    """Who sends; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word."""
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    found = Resource.create(None if named else {"service.name": SERVICE})
    ours = Resource({"service.version": VERSION, "service.instance.id": str(uuid.uuid4())})
    return ours.merge(found)
