"""A real server, with its engine here and in a process of its own, sends traces of its requests to a real receiver."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from server.service import Service
from tests.server.builders import MODEL_NAME, running
from tests.server.chat_builders import HELLO, save_chat_model
from tests.server.test_disconnect import wait_for
from tests.server.test_engine_process import build
from tests.server.tracing.receiver import Receiver, attributes, receiving

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "tracestate": "rojo=1"}
SECRET = "the quick brown fox jumps over the lazy dog"


@dataclass
class Traced:
    receiver: Receiver
    answers: dict[str, httpx.Response]
    logged: dict[str, logging.LogRecord]  # lines of the access log, by request


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, logging.LogRecord] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.request_id] = record  # type: ignore[attr-defined]


def ask(http: httpx.Client, request_id: str, path: str = "completions", **body: Any) -> httpx.Response:
    headers = {"X-Request-Id": request_id, **body.pop("headers", {})}
    prompt = {"messages": HELLO} if path == "chat/completions" else {"prompt": SECRET}
    whole = {"model": MODEL_NAME, "max_tokens": 24, "ignore_eos": True, "temperature": 0, **prompt, **body}
    return http.post(f"/v1/{path}", json=whole, headers=headers)


@pytest.fixture(scope="module", params=[False, True], ids=["engine here", "engine process"])
def traced(
    request: pytest.FixtureRequest, tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Traced]:
    model = save_chat_model(tiny_model, tmp_path_factory.mktemp("chat") / "model")
    kept = _Kept()
    access = logging.getLogger("truedraft.access")
    level = access.level
    access.addHandler(kept)
    access.setLevel("INFO")
    with receiving() as receiver:
        service: Service = build(
            model, model_home, engine_process=request.param, otlp_endpoint=receiver.url, audit_rate=0.0
        )
        with running(service) as base, httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
            answers = {
                "plain": ask(http, "plain"),
                "chat": ask(http, "chat", "chat/completions", stream=True, headers=PARENT),
                "several": ask(http, "several", prompt=["a b", "c d e"], n=2, max_tokens=3, temperature=1.0, seed=-7),
                "refused": ask(http, "refused", max_tokens=-1),
                "tokenize": http.post("/tokenize", json={"prompt": "a"}, headers={"X-Request-Id": "tokenize"}),
            }
            leaving = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
            with http.stream("POST", "/v1/completions", json=leaving, headers={"X-Request-Id": "left"}) as response:
                next(response.iter_raw())
            for request_id in ("plain", "chat", "several", "refused", "left"):
                receiver.trace(request_id)
            yield Traced(receiver, answers, kept.lines)
            counts = service.tracing.counts if service.tracing is not None else {}
            wait_for(lambda: counts["sent"] == 5, "it was not counted")
            assert counts == {"sent": 5, "unsampled": 0, "queue_full": 0, "export_failed": 0}
    access.removeHandler(kept)
    access.setLevel(level)


def milliseconds(span: Span) -> float:
    return (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6


def test_a_request_has_its_phases_and_they_are_what_its_answer_says(traced: Traced) -> None:
    root, *phases = traced.receiver.trace("plain")
    spans = {span.name: span for span in phases}
    told = traced.answers["plain"].json()["metrics"]
    assert list(spans) == ["queue", "prefill", "decode"]
    assert milliseconds(spans["queue"]) == pytest.approx(told["queue_time_ms"], abs=2e-3)
    first = spans["decode"].start_time_unix_nano - root.start_time_unix_nano
    assert first / 1e6 == pytest.approx(told["time_to_first_token_ms"], abs=2e-3)
    last = spans["decode"].end_time_unix_nano - root.start_time_unix_nano
    assert last / 1e6 == pytest.approx(told["generation_time_ms"], abs=2e-3)
    assert last / 1e6 <= milliseconds(root)


def test_its_attributes_are_those_of_its_answer(traced: Traced) -> None:
    root, *_ = traced.receiver.trace("plain")
    answer = traced.answers["plain"].json()
    speculation = answer["metrics"]["speculative_decoding"]
    found = attributes(root)
    assert root.name == f"text_completion {MODEL_NAME}"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL_NAME,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": answer["seed"],
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": answer["model"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "http.response.status_code": 200,
        "truedraft.outcome": "complete",
        "truedraft.speculation.steps": speculation["num_spec_steps"],
        "truedraft.speculation.drafted_tokens": speculation["num_draft_tokens"],
        "truedraft.speculation.accepted_tokens": speculation["num_accepted_draft_tokens"],
    }
    assert {name: found.get(name) for name in expected} == expected


def test_a_chat_goes_on_in_its_callers_trace(traced: Traced) -> None:
    root, *phases = traced.receiver.trace("chat")
    assert traced.answers["chat"].status_code == 200
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE_ID, PARENT_ID, "rojo=1")
    assert {span.trace_id.hex() for span in phases} == {TRACE_ID}
    assert root.name == f"chat {MODEL_NAME}"
    assert attributes(root)["gen_ai.response.time_to_first_chunk"] > 0


def test_each_choice_has_its_phases(traced: Traced) -> None:
    root, *phases = traced.receiver.trace("several")
    assert attributes(root)["truedraft.prompts"] == 2
    assert attributes(root)["gen_ai.request.choice.count"] == 2
    assert attributes(root)["gen_ai.request.seed"] == -7
    assert attributes(root)["gen_ai.usage.output_tokens"] == 12
    by_choice = [(attributes(span)["truedraft.choice"], span.name) for span in phases]
    assert sorted(by_choice) == sorted((i, name) for i in range(4) for name in ("queue", "prefill", "decode"))


def test_a_refused_request_has_a_span_without_phases(traced: Traced) -> None:
    (root,) = traced.receiver.trace("refused")
    assert attributes(root)["http.response.status_code"] == 400
    assert attributes(root)["truedraft.outcome"] == "refused"


def test_of_a_client_who_left_it_is_told_how_far_it_came(traced: Traced) -> None:
    root, *phases = traced.receiver.trace("left")
    assert attributes(root)["truedraft.outcome"] == "client_left"
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    decode = attributes(phases[2])
    assert decode["truedraft.finish_reason"] == "abort"
    assert 0 < decode["gen_ai.usage.output_tokens"] < 400


def test_what_generates_nothing_is_not_traced(traced: Traced) -> None:
    assert traced.answers["tokenize"].status_code == 200
    ids = {attributes(span).get("truedraft.request_id") for span in traced.receiver.spans}
    assert "tokenize" not in ids


def test_the_access_log_has_the_ids_of_the_trace_and_of_the_answer(traced: Traced) -> None:
    for request_id in ("plain", "chat", "several", "refused", "left"):
        root, *_ = traced.receiver.trace(request_id)
        assert traced.logged[request_id].trace_id == root.trace_id.hex()  # type: ignore[attr-defined]
    answer = traced.answers["plain"].json()
    assert traced.logged["plain"].answer_id == answer["id"]  # type: ignore[attr-defined]


def test_no_text_of_a_request_or_an_answer_is_in_a_trace(traced: Traced) -> None:
    told = "".join(str(message) for message in traced.receiver.messages)
    assert "quick brown" not in told
    text = traced.answers["plain"].json()["choices"][0]["text"]
    assert text
    assert text not in told
