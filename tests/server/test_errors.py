"""Errors and attacks over a real socket: the right status, all four keys, nothing about the inside."""

from __future__ import annotations

import http.client as http_client
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from server.edge import clean_request_id
from server.metrics import REJECTIONS
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, metric, running
from tests.server.stalls import assert_others_are_served

JSON = {"Content-Type": "application/json"}
POST = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY: dict[str, Any] = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 1}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    for secret in ("0x", "Traceback", ".py", "/tmp", "/home", "/root"):
        assert secret not in error["message"]
    assert response.headers["x-request-id"]
    return error


def raw(base: str, data: bytes, *, then: bytes | None = None, wait: float = 0.0) -> bytes:
    """Send bytes as they are and read to the end of the connection."""
    url = urlparse(base)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=20) as sock:
        try:
            sock.sendall(data)
            if then is not None:
                time.sleep(wait)
                sock.sendall(then)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while piece := sock.recv(65536):
                answer += piece
        except ConnectionResetError:
            pass
        return answer


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "//v1/models", 404, "not_found"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/metrics", 405, "method_not_allowed"),
    ],
)
def test_wrong_paths_and_methods(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    response = http.request(method, path)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    assert (status != 405) or response.headers["allow"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": 'application/json; x=y; Charset="utf-16"'},
        {**JSON, "Content-Encoding": "gzip"},
    ],
    ids=str,
)
def test_what_is_not_plain_json_is_a_415(http: httpx.Client, headers: dict[str, str]) -> None:
    response = http.post("/v1/completions", content=json.dumps(BODY).encode(), headers=headers)
    assert response.status_code == 415
    error_of(response)


@pytest.mark.parametrize("parameters", ["; charset=UTF-8", ';charset="utf-8"', "; boundary=x", "; x=y ; charset=utf8;"])
def test_parameters_of_the_media_type_are_no_matter(http: httpx.Client, parameters: str) -> None:
    headers = {"Content-Type": f"Application/JSON{parameters}"}
    assert http.post("/v1/completions", content=json.dumps(BODY).encode(), headers=headers).status_code == 200


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model": NaN}', b"\xff", b'{"a": 1, "a": 2}'], ids=repr)
def test_bad_json_is_a_400_over_the_wire(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400
    error_of(response)


def test_a_bad_parameter_names_itself_and_is_never_a_422(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={**BODY, "temperature": "hot"})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["type"]) == ("temperature", "invalid_request_error")
    assert "'hot'" in error["message"]


def test_a_body_over_the_cap_is_refused_by_its_announced_length(base: str, service: Service) -> None:
    length = service.settings.max_body_bytes + 1
    head = POST + f"Content-Length: {length}\r\n\r\n"
    assert raw(base, head.encode()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_before_it_reads_sees_the_413(base: str, service: Service, chunked: bool) -> None:
    body = b" " * (service.settings.max_body_bytes + 8_000_000)
    url = urlparse(base)
    connection = http_client.HTTPConnection(url.hostname or "", url.port, timeout=20)
    content = iter([body]) if chunked else body
    connection.request("POST", "/v1/completions", content, JSON, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    assert response.headers["connection"] == "close"
    assert b"request_too_large" in response.read()
    connection.close()


def test_who_asks_before_sending_a_large_body_is_answered_at_once(base: str, service: Service) -> None:
    head = f"{POST}Content-Length: {service.settings.max_body_bytes + 1}\r\nExpect: 100-continue\r\n\r\n"
    assert raw(base, head.encode()).startswith(b"HTTP/1.1 413")


def test_a_body_over_the_cap_is_refused_while_it_arrives(base: str, service: Service) -> None:
    head = f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode()
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    answer = raw(base, head + piece * (service.settings.max_body_bytes // 0x10000 + 4))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()


def test_a_body_shorter_than_it_claims_does_no_harm(base: str, http: httpx.Client) -> None:
    url = urlparse(base)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    with socket.create_connection((url.hostname or "", url.port or 0)) as sock:
        sock.sendall(head)
    assert http.post("/v1/completions", json=BODY).status_code == 200


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "5, 6"])
def test_a_content_length_that_is_no_number_is_a_4xx(base: str, length: str) -> None:
    head = POST + f"Content-Length: {length}\r\n\r\n"
    assert raw(base, head.encode()).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(
    "headers",
    [b"X: " + b"y" * 200_000, b"".join(b"X-%d: y\r\n" % i for i in range(20_000)).rstrip()],
    ids=["huge", "many"],
)
def test_huge_and_many_headers_are_a_4xx(base: str, headers: bytes) -> None:
    answer = raw(base, b"GET /health HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n\r\n")
    assert answer[:10] in (b"HTTP/1.1 4", b"")


def test_large_bodies_do_not_hold_up_the_loop(http: httpx.Client, base: str) -> None:
    ids = list(range(100, 300)) * 5000
    assert_others_are_served(
        http, lambda: httpx.post(f"{base}/v1/completions", json={**BODY, "prompt": ids}, timeout=60)
    )


@pytest.mark.parametrize(
    ("sent", "used"),
    [("abc-1.2:3_x", "abc-1.2:3_x"), ("a b\tc\x7f{}", "abc"), ("y" * 500, "y" * 128)],
)
def test_the_request_id_comes_back_without_what_could_break_a_log(http: httpx.Client, sent: str, used: str) -> None:
    assert http.get("/live", headers={"X-Request-Id": sent}).headers["x-request-id"] == used


def test_without_a_usable_request_id_a_new_one_is_made() -> None:
    made = {clean_request_id(value) for value in (None, "", "\n\n", "日本")}
    assert len(made) == 4
    assert all(len(request_id) == 32 for request_id in made)


def test_a_full_queue_is_a_503_with_retry_after(http: httpx.Client, base: str, service: Service) -> None:
    most = service.settings.max_waiting
    fill = {**BODY, "prompt": ["a"] * most, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=fill, timeout=60) as filled:
        assert filled.status_code == 200
        for stream in (False, True):
            response = http.post("/v1/completions", json={**BODY, "prompt": ["b"] * most, "stream": stream})
            assert response.status_code == 503
            assert error_of(response)["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
    assert http.post("/v1/completions", json=BODY).status_code == 200


def test_more_prompts_than_may_ever_wait_are_a_400(http: httpx.Client, service: Service) -> None:
    response = http.post("/v1/completions", json={**BODY, "prompt": ["a"] * (service.settings.max_waiting + 1)})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


@pytest.mark.parametrize(
    "change",
    [
        {"allowed_token_ids": [0], "min_tokens": 3},
        {"allowed_token_ids": [0, 70, 71], "stop_token_ids": [71, 70], "min_tokens": 1},
        {"allowed_token_ids": "ab", "bad_words": ["a", "b"]},
        {"allowed_token_ids": "ab", "bad_words": "a", "stop_token_ids": "b", "min_tokens": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_leave_no_token_from_the_start_are_refused_by_name(
    http: httpx.Client, service: Service, change: dict[str, Any], stream: bool
) -> None:
    assert service.facts.eos_token_ids == {0}
    texts = {name: service.tokenizer.encode_many([ids])[0] for name, ids in change.items() if name.endswith("_ids")
             and isinstance(ids, str)}  # fmt: skip
    body = {**BODY, "max_tokens": 10, "stream": stream, **change, **texts}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"] == "allowed_token_ids"
    possible = {**body, "allowed_token_ids": [*body["allowed_token_ids"], 100], "stream": False}
    assert http.post("/v1/completions", json=possible).status_code == 200
    assert http.post("/v1/completions", json={**body, "max_tokens": 0, "min_tokens": 0}).status_code == 200


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 10**6}, "context_length"),
        ({"prompt": "a " * 100_000}, "context_length"),
        ({"prompt": [[70] * 600] * 2}, "context_length"),
        ({"prompt": [[70] * 500] * 2, "max_tokens": 100}, "context_length"),
        ({"model": "other"}, None),
        ({"temperature": -1}, None),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_refusal_for_size_is_counted_once(base: str, change: dict[str, Any], reason: str | None) -> None:
    before = {name: metric(base, "admission_rejections_total", reason=name) for name in REJECTIONS}
    assert httpx.post(f"{base}/v1/completions", json={**BODY, **change}).status_code in (400, 404)
    after = {name: metric(base, "admission_rejections_total", reason=name) for name in REJECTIONS}
    assert after == {name: count + (name == reason) for name, count in before.items()}


def test_what_never_fits_the_kv_cache_is_counted_as_such(tiny_model: Path, model_home: Path) -> None:
    with running(build_service(tiny_model, model_home, num_blocks=4)) as base:
        response = httpx.post(f"{base}/v1/completions", json={**BODY, "max_tokens": 100})
        assert error_of(response)["code"] == "kv_capacity_exceeded"
        assert metric(base, "admission_rejections_total", reason="kv_capacity") == 1
        assert metric(base, "admission_rejections_total") == 1
