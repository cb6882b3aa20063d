"""A receiver of traces: a real HTTP server that decodes OTLP, and can refuse or hang."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.server.test_disconnect import wait_for


class Receiver:
    """``url`` is what ``otlp_endpoint`` takes. ``status`` is what it answers; cleared, ``answering`` makes it hang."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.status = 200
        self.answering = threading.Event()
        self.answering.set()
        self.arrived = threading.Event()  # a message has come, answered or not
        self.messages: list[ExportTraceServiceRequest] = []  # that were answered with 200
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for message in list(self.messages)
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def resource(self) -> dict[str, Any]:
        return values(self.messages[0].resource_spans[0].resource)

    def trace(self, request_id: str) -> list[Span]:
        """Its request's span first, then the others in the order they were sent; waits for it."""
        found: list[Span] = []

        def look() -> bool:
            roots = [span for span in self.spans if attributes(span).get("truedraft.request_id") == request_id]
            found[:] = roots
            return bool(roots)

        wait_for(look, f"no trace of {request_id} came")
        (root,) = found
        return [root, *(span for span in self.spans if span.parent_span_id == root.span_id)]


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.arrived.set()
            if not receiver.answering.wait(60):
                return
            receiver.paths.append(self.path)
            receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
            if receiver.status == 200:
                receiver.messages.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            with contextlib.suppress(OSError):  # the sender has given up
                self.send_response(receiver.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver = Receiver(server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.answering.set()
        server.shutdown()
        server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {item.key: value_of(item.value) for item in span.attributes}


def values(resource: Any) -> dict[str, Any]:
    return {item.key: value_of(item.value) for item in resource.attributes}


def value_of(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return None if kind is None else getattr(value, kind)
