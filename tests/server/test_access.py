"""API keys on a real server: who gets in, what keys share, what is told of them."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import httpx
import openai
import pytest

from bench.api_key import KEY_VARIABLE
from bench.client import closed_loop
from bench.preflight.reader import Reader
from model.source_error import ModelSourceError
from scheduler.request import ChoiceSpec, EngineRequest
from server.app import create_app
from server.assemble import StartError
from server.assemble import build_service as build_from_settings
from server.auth.keys import KEYS_VARIABLE, load_keys
from server.commands import CommandError
from server.service import Service
from server.settings import load_settings
from specdec.params import SamplingParams
from tests.server.builders import MODEL_NAME, build_service
from tests.server.fixtures import server_fixtures

ALICE, BOB = "key-of-alice-4711", "key-of-bob-0815"
KEYS = load_keys(None, {KEYS_VARIABLE: f"alice:{ALICE},bob:{BOB}"})

CLOSE = "Connection: close\r\n"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed_service(tiny_model: Path, model_home: Path) -> Service:
    return build_service(tiny_model, model_home, keys=KEYS)


keyed, client = server_fixtures("module", service="keyed_service", base="keyed")


def complete(client: httpx.Client, key: str, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"model": MODEL_NAME, **body}, headers=bearer(key))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def exchange(base: str, request: bytes) -> list[int]:
    """Send raw bytes, the last request with CLOSE, and return the status of each answer that comes."""
    url = urlparse(base)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=20) as sock:
        sock.sendall(request)
        raw = b""
        while piece := sock.recv(65536):
            raw += piece
    return [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]


def test_the_openai_client_gets_in_with_a_key_and_nobody_without(keyed: str) -> None:
    with openai.OpenAI(base_url=f"{keyed}/v1", api_key=ALICE) as client:
        assert [model.id for model in client.models.list()] == [MODEL_NAME]
        assert client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=2).usage
        assert list(client.completions.create(model=MODEL_NAME, prompt="a", max_tokens=2, stream=True))
    with openai.OpenAI(base_url=f"{keyed}/v1", api_key=ALICE + "x") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model=MODEL_NAME, prompt="a", stream=True)
        assert caught.value.code == "invalid_api_key"
        assert caught.value.response.headers["x-request-id"]
        assert caught.value.response.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/./v1/models",
        "/live/../v1/models",
        "/live/%2e%2e/v1/models",
        "/live%2f..%2fv1/models",
        "/live/..;/v1/models",
        "/%2e%2e/v1/models",
        "/%6cive",
        "/live/",
        "/live%00",
        "/live%0d%0aX:y",
        "/LIVE",
        "//live",
        "http://x/live",
        "http://x/v1/models",
        "http://x@live/v1/models",
        "*",
        "/metrics",
        "/%64ocs",
        "/docs//",
        "/openapi.json",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_path_trick_without_a_key_is_401(keyed: str, method: str, target: str) -> None:
    head = f"{method} {target} HTTP/1.1\r\nHost: live\r\nX-Original-URL: /live\r\nContent-Length: 0\r\n{CLOSE}\r\n"
    assert exchange(keyed, head.encode()) == [401]


@pytest.mark.parametrize("host", ["Host: /live", "Host: x\r\nHost: live", "Host: ", "X-Forwarded-Host: live"])
def test_a_host_trick_without_a_key_gets_nothing(keyed: str, host: str) -> None:
    (status,) = exchange(keyed, f"GET /v1/models HTTP/1.1\r\n{host}\r\n{CLOSE}\r\n".encode())
    assert status in (400, 401)


def test_a_path_trick_with_a_key_is_no_other_path(keyed: str) -> None:
    for target in ("//v1/models", "/v1//models", "/live/../v1/models", "http://x/v1/models"):
        head = f"GET {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n{CLOSE}\r\n"
        assert exchange(keyed, head.encode()) == [404], target


def test_a_doubled_key_is_401_on_the_wire(keyed: str) -> None:
    line = f"Authorization: Bearer {ALICE}\r\n"
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{CLOSE}"
    assert exchange(keyed, f"{head}{line}\r\n".encode()) == [200]
    assert exchange(keyed, f"{head}{line}{line}\r\n".encode()) == [401]
    assert exchange(keyed, f"{head}{line.rstrip()}\r\n , Bearer {BOB}\r\n\r\n".encode()) in ([401], [400])


def test_the_body_of_a_refused_request_is_no_request(keyed: str) -> None:
    inner = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n\r\n"
    after = f"GET /live HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n"
    assert exchange(keyed, (head + inner + after).encode()) == [401, 200]


def test_who_has_no_key_is_not_told_how_large_a_body_may_be(keyed: str, keyed_service: Service) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {2**40}\r\n"
    assert exchange(keyed, f"{head}{CLOSE}\r\n".encode()) == [401]
    assert exchange(keyed, f"{head}Expect: 100-continue\r\nAuthorization: Bearer {BOB}\r\n\r\n".encode()) == [413]


UPGRADE = "Connection: Upgrade, close\r\nUpgrade:"
BASIC = base64.b64encode(f"alice:{ALICE}".encode()).decode()


@pytest.mark.parametrize(
    "lines",
    [
        # the key at another place, or in another form
        f"GET /v1/models?api_key={ALICE} HTTP/1.1",
        f"GET /v1/models?authorization=Bearer%20{ALICE} HTTP/1.1",
        f"GET /v1/models?access_token={ALICE} HTTP/1.1",
        f"GET http://alice:{ALICE}@x/v1/models HTTP/1.1",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: {ALICE}",
        "GET /v1/models HTTP/1.1\r\nAuthorization: Bearer",
        "GET /v1/models HTTP/1.1\r\nAuthorization:",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer: {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer\t{ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {ALICE} {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {ALICE},",
        f'GET /v1/models HTTP/1.1\r\nAuthorization: Bearer "{ALICE}"',
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {ALICE.upper()}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer alice:{ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {ALICE}\x00",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Basic {BASIC}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {KEYS.keys[0].digest.hex()}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer sha256:{KEYS.keys[0].digest.hex()}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization : Bearer {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization\x00: Bearer {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nProxy-Authorization: Bearer {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nX-Api-Key: {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nCookie: api_key={ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer x\r\nAuthorization: Bearer {ALICE}",
        f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {ALICE}\r\nAuthorization:",
        # other methods, and what a proxy would let one turn into another
        "HEAD /v1/models HTTP/1.1",
        "HEAD /metrics HTTP/1.1",
        "OPTIONS /live HTTP/1.1",
        "OPTIONS * HTTP/1.1",
        "TRACE /v1/models HTTP/1.1",
        "CONNECT x:80 HTTP/1.1",
        "DELETE /live HTTP/1.1",
        "POST /live HTTP/1.1\r\nX-HTTP-Method-Override: GET\r\nContent-Length: 0",
        "get /live HTTP/1.1",
        "GET /v1/models HTTP/1.0",
        "GET /v1/models HTTP/0.9",
        # other protocols
        f"GET /v1/models HTTP/1.1\r\n{UPGRADE} websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==",
        f"GET /ui/feed HTTP/1.1\r\n{UPGRADE} websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==",
        f"GET /v1/models HTTP/1.1\r\n{UPGRADE} h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
        "PRI * HTTP/2.0\r\n\r\nSM",
    ],
)
def test_nothing_on_the_wire_gets_in_but_one_bearer_key(keyed: str, lines: str) -> None:
    statuses = exchange(keyed, f"{lines}\r\nHost: x\r\n{CLOSE}\r\n".encode("latin-1"))
    assert statuses
    assert set(statuses) <= {400, 401}


def test_an_open_path_speaks_no_other_protocol(keyed: str) -> None:
    for protocol in ("websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==", "h2c"):
        head = f"GET /live HTTP/1.1\r\nHost: x\r\n{UPGRADE} {protocol}\r\n\r\n"
        assert exchange(keyed, head.encode()) == [200]


def test_a_key_is_that_of_one_request_and_not_of_its_connection(keyed: str) -> None:
    head = "GET /v1/models HTTP/1.1\r\nHost: x\r\n"
    key = f"Authorization: Bearer {ALICE}\r\n\r\n"
    assert exchange(keyed, (f"{head}{key}{head}\r\n{head}{key}{head}{CLOSE}\r\n").encode()) == [200, 401, 200, 401]


@pytest.mark.parametrize(
    "framing",
    [
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n0;a=b\n\n\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n" + "f" * 40 + "\r\n",
        "Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
        "Content-Length: 0, 5\r\n\r\n",
        "Content-Length: +0\r\n\r\n",
        "Content-Length: -1\r\n\r\n",
        "Content-Length: 0x0\r\n\r\n",
        "Content-Length: 1_0\r\n\r\n",
    ],
)
def test_no_framing_lets_a_request_into_another_one(keyed: str, framing: str) -> None:
    """Behind a request with a key, whatever is said of its body, one without a key is refused or not seen at all."""
    outer = f"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n{framing}"
    statuses = exchange(keyed, f"{outer}GET /v1/models HTTP/1.1\r\nHost: x\r\n{CLOSE}\r\n".encode("latin-1"))
    assert statuses
    assert set(statuses) <= {400, 401, 404, 501}


def test_a_refusal_does_not_wait_for_the_body(keyed: str) -> None:
    head = 'POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\n'
    url = urlparse(keyed)
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=20) as sock:
        sock.sendall(head.encode())
        assert sock.recv(12) == b"HTTP/1.1 401"


def test_only_liveness_readiness_and_pages_without_data_answer_without_a_key(client: httpx.Client) -> None:
    for path in ("/live", "/health", "/docs", "/ui"):
        assert client.get(path).status_code == 200
    for path in ("/metrics", "/version", "/v1/server_info", "/openapi.json", "/ui/state", "/nowhere"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=bearer(BOB)).status_code in (200, 404)


def test_the_access_log_names_the_key_and_never_holds_it(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        complete(client, ALICE, prompt="a", max_tokens=1)
        client.get("/v1/models", headers=bearer(ALICE + "wrong"))
    named = [getattr(record, "key", None) for record in caplog.records if record.name == "truedraft.access"]
    assert named == ["alice", None]
    told = " ".join(str(vars(record)) for record in caplog.records if not record.name.startswith(("http", "openai")))
    assert ALICE not in told


def test_neither_names_nor_keys_are_in_metrics_or_server_info(client: httpx.Client) -> None:
    def rejected(text: str) -> float:
        return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if 'reason="invalid_api_key"' in line)

    metrics = client.get("/metrics", headers=bearer(ALICE)).text
    assert client.get("/v1/models").status_code == 401
    after = client.get("/metrics", headers=bearer(BOB)).text
    assert rejected(after) == rejected(metrics) + 1
    info = client.get("/v1/server_info", headers=bearer(ALICE)).text
    for text in (after, info):
        for secret in (ALICE, BOB, "alice", "bob", *(key.digest.hex() for key in KEYS.keys)):
            assert secret not in text


def test_requests_of_two_keys_share_no_block(client: httpx.Client) -> None:
    prompt = "one two three four five six seven eight nine ten eleven twelve " * 2

    def cached(key: str, **body: Any) -> int:
        answer = complete(client, key, prompt=prompt, max_tokens=1, **body)
        tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    for body in ({}, {"cache_salt": "the same"}):
        assert cached(ALICE, **body) == 0
        assert cached(ALICE, **body) > 0
        assert cached(BOB, **body) == 0
        assert cached(BOB, **body) > 0
    assert cached(BOB, cache_salt="alice/") == 0


def test_requests_of_two_keys_draft_from_no_output_of_the_other(client: httpx.Client) -> None:
    body = {"prompt": "xyz", "max_tokens": 40, "seed": 7, "ignore_eos": True, "temperature": 1.0}
    body["speculation"] = {"drafter": "suffix", "num_speculative_tokens": 4}

    def accepted(key: str) -> int:
        tokens: int = complete(client, key, **body)["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        return tokens

    alone = accepted(ALICE)
    assert accepted(ALICE) > alone
    assert accepted(BOB) == alone


@pytest.mark.parametrize("shared", [False, True])
def test_a_setting_lets_keys_share(keyed_service: Service, shared: bool) -> None:
    settings = keyed_service.settings.model_copy(update={"share_cache_between_keys": shared})
    service = replace(keyed_service, settings=settings)
    request = EngineRequest("r", (1,), (ChoiceSpec(0, SamplingParams(seed=0)),), 0.0, cache_salt="s")
    salts = set()
    for key in ("alice", "bob", None):
        with service.charged((request,), key) as (charged,):
            salts.add(charged.cache_salt)
    assert salts == ({"s"} if shared else {"alice/s", "bob/s", "s"})


def ask(service: Service, method: str, path: str, headers: dict[str, str], **changes: object) -> httpx.Response:
    """One request to an application of this service with other settings, without a port."""
    changed = replace(service, settings=service.settings.model_copy(update=changes))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(changed))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_the_metrics_are_open_by_a_setting(keyed_service: Service) -> None:
    assert ask(keyed_service, "GET", "/metrics", {}).status_code == 401
    assert ask(keyed_service, "GET", "/metrics", {}, metrics_without_key=True).status_code == 200
    assert ask(keyed_service, "GET", "/version", {}, metrics_without_key=True).status_code == 401


PAGE = {"Origin": "https://app.example"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


def test_cors_is_off_by_default(keyed_service: Service) -> None:
    answer = ask(keyed_service, "OPTIONS", "/v1/completions", PREFLIGHT)
    assert answer.status_code == 401
    answered = ask(keyed_service, "GET", "/v1/models", {**PAGE, **bearer(ALICE)})
    for response in (answer, answered):
        assert not [name for name in response.headers if name.startswith("access-control")]


def test_with_cors_a_preflight_needs_no_key_and_everything_else_does(keyed_service: Service) -> None:
    on = {"cors_origins": ("https://app.example",)}
    answer = ask(keyed_service, "OPTIONS", "/v1/completions", PREFLIGHT, **on)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert answer.headers["x-request-id"]
    refused = ask(keyed_service, "GET", "/v1/models", PAGE, **on)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "X-Seed" in refused.headers["access-control-expose-headers"]
    assert ask(keyed_service, "GET", "/v1/models", {**PAGE, **bearer(ALICE)}, **on).status_code == 200
    assert ask(keyed_service, "OPTIONS", "/v1/models", PAGE, **on).status_code == 401
    assert ask(keyed_service, "GET", "/v1/models", PREFLIGHT, **on).status_code == 401


def test_with_cors_other_origins_stay_out(keyed_service: Service) -> None:
    on = {"cors_origins": ("https://app.example",)}
    for origin in ("https://evil.example", "http://app.example", "https://app.example.evil", "null"):
        headers = {**PREFLIGHT, "Origin": origin}
        for answer in (
            ask(keyed_service, "OPTIONS", "/v1/completions", headers, **on),
            ask(keyed_service, "GET", "/v1/models", {**headers, **bearer(ALICE)}, **on),
        ):
            assert "access-control-allow-origin" not in answer.headers
    for_all = ask(keyed_service, "OPTIONS", "/v1/completions", PREFLIGHT, cors_origins=("*",))
    assert for_all.headers["access-control-allow-origin"] == "*"


def test_the_description_asks_for_a_key_where_one_is_needed(keyed_service: Service, http: httpx.Client) -> None:
    document = ask(keyed_service, "GET", "/openapi.json", bearer(ALICE)).json()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    secured = {
        path for path, each in document["paths"].items() for operation in each.values() if "security" in operation
    }
    assert set(document["paths"]) - secured == {"/live", "/health"}
    assert "securitySchemes" not in json.dumps(http.get("/openapi.json").json())


def test_a_server_without_keys_takes_any_key(http: httpx.Client) -> None:
    for headers in ({}, bearer("whatever"), {"Authorization": "Basic x"}):
        assert http.get("/v1/models", headers=headers).status_code == 200


def test_keys_that_cannot_be_used_end_the_start_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "alice:one")
    settings = load_settings({"model": str(tmp_path / "no-model"), "api_keys_file": str(tmp_path / "none")})
    with pytest.raises(StartError, match=r"api_keys_file .* cannot be read"):
        build_from_settings(settings, print)
    assert KEYS_VARIABLE not in os.environ


@pytest.mark.parametrize(("mode", "lines"), [(0o600, 0), (0o644, 1)])
def test_a_file_of_keys_that_others_may_read_is_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, lines: int
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\n")
    path.chmod(mode)
    settings = load_settings({"model": str(tmp_path / "no-model"), "api_keys_file": str(path), "engine_process": False})
    with pytest.raises(ModelSourceError):
        build_from_settings(settings, print)
    told = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert len(told) == lines
    assert all("0644" in line and ALICE not in line for line in told)


def test_the_commands_that_look_at_a_server_send_the_key_of_the_environment(
    keyed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 2, "ignore_eos": True}
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(CommandError, match="answers 401"):
        Reader(keyed).get("/v1/server_info")
    monkeypatch.setenv(KEY_VARIABLE, BOB)
    assert b"exactness" in Reader(keyed).get("/v1/server_info")
    (trace,), _ = asyncio.run(closed_loop(f"{keyed}/v1/completions", [body], 1))
    assert trace.num_tokens == 2
