"""Traces on their way to a receiver: what comes there, and that no receiver holds anybody up."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.tracing.export import TraceExporter, traces_url
from server.tracing.parent import TraceParent
from server.version import VERSION
from tests.server.test_disconnect import wait_for
from tests.server.tracing.builders import finished, trace
from tests.server.tracing.receiver import Receiver, attributes, receiving

PARENT = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "rojo=1,congo=2")
NOWHERE = "http://127.0.0.1:9"

Make = Callable[..., TraceExporter]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACES_SAMPLER", "TRACES_SAMPLER_ARG", "SERVICE_NAME", "RESOURCE_ATTRIBUTES", "SDK_DISABLED"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    for name in ("HEADERS", "TIMEOUT", "COMPRESSION", "ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_TRACES_{name}", raising=False)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[TraceExporter] = []

    def _make(url: str, **options: Any) -> TraceExporter:
        exporter = TraceExporter(url, **{"linger_seconds": 0.01, "close_seconds": 0.1, **options})
        made.append(exporter)
        return exporter

    yield _make
    for exporter in made:
        exporter.close()


def test_a_request_is_a_span_with_its_phases_below_it(receiver: Receiver, make: Make) -> None:
    sent = trace()
    make(receiver.url).put(sent)
    root, *children = receiver.trace("r1")
    assert receiver.paths == ["/v1/traces"]
    assert (root.name, root.kind) == ("text_completion tiny", Span.SPAN_KIND_SERVER)
    assert (root.trace_id.hex(), root.span_id.hex(), root.parent_span_id) == (sent.trace_id, sent.span_id, b"")
    assert [span.name for span in children] == ["queue", "prefill", "decode"]
    assert {span.trace_id for span in children} == {root.trace_id}
    assert len({span.span_id for span in (root, *children)}) == 4
    seconds = [
        tuple(round((at - root.start_time_unix_nano) / 1e9, 6) for at in (s.start_time_unix_nano, s.end_time_unix_nano))
        for s in (root, *children)
    ]
    assert seconds == [(0.0, 7.5), (0.0, 1.0), (1.0, 3.0), (3.0, 7.0)]
    assert attributes(children[2])["truedraft.speculation.acceptance_histogram"] == [0, 1, 1]


def test_the_resource_says_who_sends(receiver: Receiver, make: Make) -> None:
    make(receiver.url).put(trace())
    receiver.trace("r1")
    assert receiver.resource["service.name"] == "truedraft"
    assert receiver.resource["service.version"] == VERSION
    assert receiver.resource["service.instance.id"]


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test"},
        {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine,deployment.environment.name=test"},
    ],
)
def test_the_environment_has_the_last_word_on_who_sends(
    receiver: Receiver, make: Make, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    make(receiver.url).put(trace())
    receiver.trace("r1")
    assert receiver.resource["service.name"] == "mine"
    assert receiver.resource["deployment.environment.name"] == "test"
    assert receiver.resource["service.version"] == VERSION


def test_the_exporters_own_variables_hold(receiver: Receiver, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    make(receiver.url).put(trace())
    receiver.trace("r1")
    assert receiver.headers[0]["x-tenant"] == "blue"


def test_a_trace_goes_on_below_its_parent_and_passes_its_state_on(receiver: Receiver, make: Make) -> None:
    make(receiver.url).put(trace(parent=PARENT, trace_id=PARENT.trace_id))
    root, *children = receiver.trace("r1")
    assert root.trace_id.hex() == PARENT.trace_id
    assert root.parent_span_id.hex() == PARENT.span_id
    assert {span.trace_state for span in (root, *children)} == {"rojo=1,congo=2"}


def test_a_state_that_is_none_is_left_out_and_the_trace_is_sent(receiver: Receiver, make: Make) -> None:
    make(receiver.url).put(trace(parent=TraceParent(PARENT.trace_id, PARENT.span_id, 1, "NOT a state")))
    root, *_ = receiver.trace("r1")
    assert root.trace_state == ""


def test_an_unsampled_parent_means_no_trace(receiver: Receiver, make: Make) -> None:
    exporter = make(receiver.url)
    exporter.put(trace(request_id="quiet", parent=TraceParent(PARENT.trace_id, PARENT.span_id, 0)))
    exporter.put(trace())
    receiver.trace("r1")
    assert {attributes(span).get("truedraft.request_id") for span in receiver.spans} == {"r1", None}
    wait_for(lambda: exporter.counts["sent"] == 1, "it was not counted")
    assert exporter.counts["unsampled"] == 1


def test_a_sampler_of_the_environment_decides(receiver: Receiver, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    exporter = make(receiver.url)
    exporter.put(trace(request_id="quiet"))
    exporter.put(trace(parent=PARENT, trace_id=PARENT.trace_id))
    receiver.trace("r1")
    wait_for(lambda: exporter.counts["unsampled"] == 1, "it was not counted")


def test_a_failed_request_is_an_error_and_a_refused_one_is_not(receiver: Receiver, make: Make) -> None:
    exporter = make(receiver.url)
    exporter.put(trace(request_id="failed", finished=[finished(finish_reason="error")]))
    exporter.put(trace(request_id="refused", status=400, model=None, finished=[]))
    failed, *_ = receiver.trace("failed")
    refused, *below = receiver.trace("refused")
    assert (failed.status.code, failed.status.message) == (Status.STATUS_CODE_ERROR, "failed")
    assert refused.status.code == Status.STATUS_CODE_UNSET
    assert (refused.name, below) == ("text_completion", [])


def test_what_finds_the_queue_full_is_dropped_and_counted_and_nobody_waits(receiver: Receiver, make: Make) -> None:
    receiver.answering.clear()
    exporter = make(receiver.url, max_waiting=4, close_seconds=10.0)
    exporter.put(trace(request_id="first"))
    assert receiver.arrived.wait(60)  # the thread is held up in sending it
    for i in range(10):
        exporter.put(trace(request_id=f"r{i}"))
    assert exporter.counts["queue_full"] == 6
    receiver.answering.set()
    receiver.trace("r3")
    wait_for(lambda: exporter.counts["sent"] == 5, "they were not counted")
    assert exporter.counts["export_failed"] == 0


def test_what_a_receiver_refuses_is_lost_and_the_next_is_sent(
    receiver: Receiver, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.status = 400
    exporter = make(receiver.url)
    with caplog.at_level(logging.WARNING, "truedraft.tracing"):
        exporter.put(trace(request_id="lost"))
        wait_for(lambda: exporter.counts["export_failed"] == 1, "it was not counted")
        exporter.put(trace(request_id="lost, too"))
        wait_for(lambda: exporter.counts["export_failed"] == 2, "it was not counted")
        receiver.status = 200
        exporter.put(trace())
        receiver.trace("r1")
        wait_for(lambda: exporter.counts["sent"] == 1, "it was not counted")
    told = [(record.getMessage(), record.lost) for record in caplog.records if record.name == "truedraft.tracing"]  # type: ignore[attr-defined]
    assert told == [
        (f"traces cannot be sent to {receiver.url} (status 400)", 1),
        (f"traces are sent to {receiver.url} again", 2),
    ]


def test_a_receiver_that_is_not_there_is_told_in_one_line(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with caplog.at_level(logging.WARNING, "truedraft.tracing"):
        exporter = make(NOWHERE)
        exporter.put(trace())
        wait_for(lambda: exporter.counts["export_failed"] == 1, "it was not counted")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "truedraft.tracing"]
    assert line == f"traces cannot be sent to {NOWHERE} (ConnectionError)"


def test_one_trace_that_cannot_be_made_into_spans_does_not_end_the_thread(receiver: Receiver, make: Make) -> None:
    exporter = make(receiver.url)
    exporter.put(trace(trace_id="no number"))
    wait_for(lambda: exporter.counts["export_failed"] == 1, "it was not counted")
    exporter.put(trace())
    receiver.trace("r1")


def test_closing_sends_what_waits(receiver: Receiver, make: Make) -> None:
    exporter = make(receiver.url, linger_seconds=60.0, close_seconds=60.0)
    for i in range(300):  # more than one batch
        exporter.put(trace(request_id=f"r{i}"))
    exporter.close()
    assert exporter.counts["sent"] == 300
    exporter.put(trace(request_id="late"))
    assert exporter.counts["queue_full"] == 1
    exporter.close()


def test_closing_does_not_wait_for_a_receiver_that_hangs(receiver: Receiver, make: Make) -> None:
    receiver.answering.clear()
    exporter = make(receiver.url, close_seconds=0.05)
    exporter.put(trace())
    assert receiver.arrived.wait(60)
    closing = threading.Thread(target=exporter.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp", "https://host/otlp/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_the_path_of_traces_is_added_unless_it_is_there(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys\n"
        "from server.edge import EdgeMiddleware\n"
        "from server.settings import load_settings\n"
        "from server.tracing.start import start_tracing\n"
        "assert start_tracing(load_settings()) is None\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'requests'))])\n"
    )
    root = Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert ran.stdout == "[]\n"
