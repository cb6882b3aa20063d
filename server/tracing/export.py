"""Sends traces over OTLP from a thread of its own: whoever hands one on never waits, and no failure reaches them."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from server.tracing.spans import SpanMaker
from server.tracing.trace import RequestTrace
from server.tracing.tracing import TRACE_RESULTS

logger = logging.getLogger("truedraft.tracing")

TRACES_PATH = "/v1/traces"
MAX_WAITING = 2048  # traces; more are dropped
MAX_BATCH = 128  # traces in one message
LINGER_SECONDS = 1.0  # that a batch waits for more
CLOSE_SECONDS = 3.0  # for what waits when the server ends
REMIND_SECONDS = 60.0  # between two lines that say that traces cannot be sent


class TraceExporter:
    """Takes traces (``server.tracing.tracing.Sink``) and sends their spans in batches.

    What finds the queue full is dropped, and so is a batch that the receiver does not take within the exporter's own
    timeout (OTEL_EXPORTER_OTLP_TIMEOUT, 10 seconds); ``counts`` says of how many traces what became of them.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_waiting: int = MAX_WAITING,
        linger_seconds: float = LINGER_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self._session = _Session()
        self._exporter: SpanExporter = OTLPSpanExporter(traces_url(endpoint), session=self._session)
        self._maker = SpanMaker()
        self._counts = dict.fromkeys(TRACE_RESULTS, 0)  # queue_full: by who puts; the others: by the thread
        self._linger_seconds = linger_seconds
        self._close_seconds = close_seconds
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(max_waiting)
        self._closing = threading.Event()
        self._failures = _Failures(endpoint)
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Mapping[str, int]:
        """Traces by what became of them, since the start; TRACE_RESULTS. To look at, in any thread."""
        return self._counts

    def put(self, trace: RequestTrace) -> None:
        """Never blocks. For one thread."""
        try:
            if self._closing.is_set():
                raise queue.Full
            self._queue.put_nowait(trace)
        except queue.Full:
            self._counts["queue_full"] += 1

    def close(self) -> None:
        """Send what waits, for a few seconds at most. May be called again."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread is not waiting for anything
            self._queue.put_nowait(None)
        self._thread.join(self._close_seconds)
        self._exporter.shutdown()  # ends its waiting for another try, too

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            batch = self._take_batch()
            if batch:
                try:
                    self._send(batch)
                except Exception:  # the next batch is sent all the same
                    logger.exception("%d traces were lost", len(batch))
                    self._counts["export_failed"] += len(batch)

    def _take_batch(self) -> list[RequestTrace]:
        first = self._queue.get()
        if self._queue.qsize() < MAX_BATCH:
            self._closing.wait(self._linger_seconds)
        batch = [] if first is None else [first]
        with contextlib.suppress(queue.Empty):
            while len(batch) < MAX_BATCH:
                if (trace := self._queue.get_nowait()) is not None:
                    batch.append(trace)
        return batch

    def _send(self, batch: Sequence[RequestTrace]) -> None:
        spans: list[ReadableSpan] = []
        num_sampled = 0
        for trace in batch:
            made = self._maker.spans(trace)
            num_sampled += bool(made)
            spans += made
        self._counts["unsampled"] += len(batch) - num_sampled
        if not spans:
            return
        sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        self._counts["sent" if sent else "export_failed"] += num_sampled
        if sent:
            self._failures.over()
        else:
            self._failures.tell(num_sampled, self._session.problem)


def traces_url(endpoint: str) -> str:
    """Where OTLP over HTTP takes traces at this address; one that names the path itself is left as it is."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(TRACES_PATH) else endpoint + TRACES_PATH


class _Session(requests.Session):
    """Knows why the last request failed: the exporter tells its result, and the reason only to its own log."""

    def __init__(self) -> None:
        super().__init__()
        self.problem = "unknown"

    def request(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        try:
            response = super().request(*args, **kwargs)
        except requests.RequestException as error:
            self.problem = type(error).__name__  # its text has addresses of objects
            raise
        self.problem = f"status {response.status_code}"
        return response


class _Failures:
    """Says in the log when traces are lost, at once and then now and again, and when that is over."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._num_lost = 0  # since sending failed first; 0 while it works
        self._told: float | None = None

    def tell(self, number: int, problem: str) -> None:
        self._num_lost += number
        if self._told is None or time.monotonic() - self._told >= REMIND_SECONDS:
            self._told = time.monotonic()
            logger.warning("traces cannot be sent to %s (%s)", self._endpoint, problem, extra={"lost": self._num_lost})

    def over(self) -> None:
        if self._num_lost:
            logger.warning("traces are sent to %s again", self._endpoint, extra={"lost": self._num_lost})
        self._num_lost, self._told = 0, None
