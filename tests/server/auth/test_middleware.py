"""Deny by default: without a key, nothing but the open paths, spelt as they are, gets through."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from server.auth.keys import KEYS_VARIABLE, NO_KEYS, ApiKeys, load_keys
from server.auth.middleware import ALWAYS_OPEN, AccessMiddleware
from server.rate import RateLimiter, RateLimits

KEYS = load_keys(None, {KEYS_VARIABLE: "alice:secret-a,bob:secret-b"})
UNLIMITED = RateLimits()
GOOD = (b"authorization", b"Bearer secret-a")


class Inner:
    """Notes the key's name of what gets through, and answers 204."""

    def __init__(self) -> None:
        self.names: list[str | None] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.names.append(scope["state"]["key"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Asked:
    """What became of one request."""

    def __init__(
        self,
        target: str = "/v1/models",
        *headers: tuple[bytes, bytes],
        method: str = "GET",
        keys: ApiKeys = KEYS,
        open_paths: frozenset[str] = ALWAYS_OPEN,
        limits: RateLimits = UNLIMITED,
    ) -> None:
        self.inner = Inner()
        self.refused: list[str] = []
        names: tuple[str | None, ...] = keys.names or (None,)
        app = AccessMiddleware(
            self.inner,
            keys=keys,
            limiter=RateLimiter(dict.fromkeys(names, limits), count=self.refused.append, clock=lambda: 0.0),
            count=self.refused.append,
            open_paths=open_paths,
        )
        raw = target.partition("?")[0]  # as uvicorn makes a scope of a request's target
        self.scope = {
            "type": "http",
            "method": method,
            "path": unquote(raw),
            "raw_path": raw.encode(),
            "query_string": b"",
            "headers": list(headers),
            "state": {},
        }
        self.messages: list[Message] = []
        asyncio.run(app(self.scope, self._receive, self._send))

    async def _receive(self) -> Message:
        raise AssertionError("nothing of the body is read")

    async def _send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.messages[1]["body"])["error"]
        return error


def test_a_key_gets_through_and_its_name_is_known_inside() -> None:
    for header, name in (
        (b"Bearer secret-a", "alice"),
        (b"bearer   secret-b", "bob"),
        (b"  BEARER secret-b ", "bob"),
    ):
        asked = Asked("/v1/models", (b"Authorization", header))
        assert (asked.status, asked.inner.names) == (204, [name])


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b""),),
        ((b"authorization", b"Bearer"),),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Bearer wrong"),),
        ((b"authorization", b"Bearer secret-a, Bearer secret-a"),),
        ((b"authorization", b"Bearer secret-a secret-a"),),
        ((b"authorization", b"Bearer secret-a\x00"),),
        ((b"authorization", b"secret-a"),),
        ((b"authorization", b"Basic secret-a"),),
        ((b"authorization", b"Bearer SECRET-A"),),
        ((b"authorization", b"Bearer alice"),),
        ((b"authorization", b"Bearer alice:secret-a"),),
        (GOOD, GOOD),
        (GOOD, (b"authorization", b"Bearer wrong")),
        ((b"authorization", b"Bearer wrong"), GOOD),
        (GOOD, (b"Authorization", b"")),
        ((b"x-api-key", b"secret-a"),),
        ((b"api-key", b"secret-a"),),
        ((b"proxy-authorization", b"Bearer secret-a"),),
        ((b"cookie", b"authorization=Bearer secret-a"),),
    ],
    ids=str,
)
def test_a_missing_wrong_or_doubled_key_is_401(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    asked = Asked("/v1/models", *headers)
    assert asked.status == 401
    assert asked.error["code"] == "invalid_api_key"
    assert asked.error["type"] == "invalid_request_error"
    assert set(asked.error) == {"message", "type", "param", "code"}
    assert asked.headers[b"www-authenticate"] == b'Bearer realm="truedraft"'
    assert "secret" not in asked.error["message"]
    assert not asked.inner.names
    assert asked.refused == ["invalid_api_key"]


def test_a_digest_is_not_a_key() -> None:
    digest = KEYS.keys[0].digest.hex().encode()
    assert Asked("/v1/models", (b"authorization", b"Bearer " + digest)).status == 401
    assert Asked("/v1/models", (b"authorization", b"Bearer sha256:" + digest)).status == 401


@pytest.mark.parametrize("path", sorted(ALWAYS_OPEN))
def test_liveness_and_readiness_need_no_key(path: str) -> None:
    for method in ("GET", "HEAD"):
        assert Asked(path, method=method).status == 204
        assert Asked(path + "?x=/v1/models", method=method).status == 204
    for method in ("POST", "OPTIONS", "PUT", "get", "CONNECT"):
        assert Asked(path, method=method).status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/metrics",
        "/version",
        "/v1/server_info",
        "/docs",
        "/openapi.json",
        "/docs/oauth2-redirect",
        "/no/such/path",
        "/ui",
    ],
)
def test_all_other_paths_need_a_key_whether_they_exist_or_not(path: str) -> None:
    for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "TRACE"):
        assert Asked(path, method=method).status == 401
        assert Asked(path, GOOD, method=method).status == 204


def test_the_metrics_are_open_only_by_setting() -> None:
    assert Asked("/metrics").status == 401
    opened = ALWAYS_OPEN | {"/metrics"}
    assert Asked("/metrics", open_paths=opened).status == 204
    assert Asked("/metrics/", open_paths=opened).status == 401


ODD = st.lists(
    st.sampled_from(
        [
            "/",
            "//",
            "live",
            "health",
            "v1",
            "models",
            "..",
            ".",
            "%2e%2e",
            "%2f",
            "%5c",
            "\\",
            ";",
            "%00",
            "?",
            "#",
            "%6c",
            "ive",
            "Live",
            "%20",
            "*",
            "http://x",
            "@",
            ":",
            "%c0%af",
            "%ef%bc%8f",
        ]
    ),
    max_size=6,
).map("".join)


@given(target=ODD)
@example("//v1/models")
@example("/live/../v1/models")
@example("/live/%2e%2e/v1/models")
@example("/live%2f..%2fv1/models")
@example("/v1/models/../../live")
@example("/%6cive")
@example("/live/")
@example("/live;/v1/models")
@example("/live%00")
@example("/live%20")
@example("//live")
@example("/./live")
@example("/Live")
@example("live")
@example("*")
@example("")
@example("http://x/live")
@example("http://live/v1/models")
@example("https://x@live/live")
def test_an_odd_path_without_a_key_is_401(target: str) -> None:
    if target.partition("?")[0] not in ALWAYS_OPEN:
        asked = Asked(target)
        assert asked.status == 401
        assert not asked.inner.names


@pytest.mark.parametrize(
    "header",
    [
        b"host",
        b"x-original-url",
        b"x-rewrite-url",
        b"x-forwarded-path",
        b"x-forwarded-uri",
        b"x-forwarded-prefix",
        b"x-http-method-override",
        b"forwarded",
        b"x-forwarded-host",
        b"x-forwarded-for",
        b"referer",
    ],
)
@pytest.mark.parametrize("value", [b"/live", b"live", b"127.0.0.1", b"GET /live", b"x/live?"])
def test_no_other_header_decides(header: bytes, value: bytes) -> None:
    assert Asked("/v1/models", (header, value)).status == 401


def test_without_keys_everything_is_open_whatever_the_header_says() -> None:
    for headers in ((), (GOOD,), (GOOD, GOOD), ((b"authorization", b"nonsense"),)):
        asked = Asked("/v1/models", *headers, keys=NO_KEYS)
        assert (asked.status, asked.inner.names) == (204, [None])


def test_what_is_no_http_does_not_get_through() -> None:
    inner = Inner()
    app = AccessMiddleware(
        inner, keys=KEYS, limiter=RateLimiter({}, count=print, clock=lambda: 0.0), count=print, open_paths=ALWAYS_OPEN
    )

    async def nothing(*_: Any) -> Any:
        return None

    with pytest.raises(RuntimeError, match="websocket"):
        asyncio.run(app({"type": "websocket", "path": "/live", "headers": []}, nothing, nothing))
    assert not inner.names


def test_posts_are_counted_and_the_answer_says_when_to_come_back() -> None:
    limits = RateLimits(requests=1)
    assert Asked(keys=NO_KEYS, method="POST", limits=limits).status == 204
    limiter_of_alice = RateLimiter({"alice": limits, "bob": limits}, count=lambda reason: None, clock=lambda: 0.0)
    inner = Inner()
    app = AccessMiddleware(inner, keys=KEYS, limiter=limiter_of_alice, count=print)

    def ask(method: str, *headers: tuple[bytes, bytes]) -> list[Message]:
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        async def receive() -> Message:
            raise AssertionError("nothing of the body is read")

        scope = {"type": "http", "method": method, "path": "/x", "headers": list(headers), "state": {}}
        asyncio.run(app(scope, receive, send))
        return messages

    assert ask("POST", GOOD)[0]["status"] == 204
    refused = ask("POST", GOOD)
    assert refused[0]["status"] == 429
    assert dict(refused[0]["headers"])[b"retry-after"] == b"60"
    assert json.loads(refused[1]["body"])["error"]["code"] == "rate_limit_exceeded"
    assert ask("GET", GOOD)[0]["status"] == 204
    assert ask("POST", (b"authorization", b"Bearer secret-b"))[0]["status"] == 204
    assert ask("POST")[0]["status"] == 401
