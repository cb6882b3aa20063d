"""Connections of clients who say nothing, or do not read: closed in time; and too many of them: refused."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest

from server.connections import OTHER_DESCRIPTORS, allow_connections
from tests.server.builders import MODEL_NAME, build_service, metric, running
from tests.server.test_disconnect import assert_idle, wait_for
from tests.server.test_errors import POST, error_of

MAX_CONNECTIONS = 6
HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def base(tiny_model: Path, model_home: Path) -> Iterator[str]:
    service = build_service(
        tiny_model, model_home, max_connections=MAX_CONNECTIONS, header_timeout=1.0, send_timeout=1.0, max_n=128
    )
    with running(service, send_buffer=4096) as url:
        yield url


@contextlib.contextmanager
def connection(base: str, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    url = urlparse(base)
    with socket.socket() as sock:
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(120)
        sock.connect((url.hostname or "", url.port or 0))
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """To the end of the connection. Raises TimeoutError if it stays open."""
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize("begun", [b"", HEAD[:20], HEAD], ids=["nothing", "a part", "all but the end"])
def test_a_head_that_does_not_arrive_closes_the_connection(base: str, begun: bytes) -> None:
    with connection(base) as sock:
        sock.sendall(begun)
        assert read_all(sock) == b""


def test_the_head_of_a_later_request_has_to_arrive_too(base: str) -> None:
    with connection(base) as sock:
        sock.sendall(HEAD + b"\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        sock.sendall(HEAD[:20])
        read_all(sock)


def test_a_request_may_take_longer_than_its_head(base: str) -> None:
    body = f'{{"model": "{MODEL_NAME}", "prompt": "a", "max_tokens": 100, "ignore_eos": true}}'.encode()
    with connection(base) as sock:
        sock.sendall(f"{POST}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert read_all(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_reads_does_not_hold_its_connection(base: str, stream: bool) -> None:
    flag = "true" if stream else "false"
    body = f'{{"model": "{MODEL_NAME}", "prompt": "a", "max_tokens": 200, "ignore_eos": true, "logprobs": 20, "n": 4, '
    payload = f'{body}"stream": {flag}}}'.encode()
    with connection(base, receive_buffer=4096) as sock:
        sock.sendall(f"{POST}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        wait_for(lambda: metric(base, "num_requests_running") > 0, "it does not run")
        assert_idle(base)
        # Only a client who reads finds out that it was closed: so count who may still connect.
        wait_for(lambda: _all_are_served(base), "its connection is still open")


def _all_are_served(base: str) -> bool:
    """As many as may be connected: so nobody else is."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=base, trust_env=False)) for _ in range(MAX_CONNECTIONS)]
        return all(client.get("/version").status_code == 200 for client in clients)


def test_a_connection_too_many_is_refused_but_told_whether_the_server_lives(base: str) -> None:
    before = metric(base, "admission_rejections_total", reason="connections")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=base, trust_env=False)) for _ in range(MAX_CONNECTIONS)]
        for client in clients:
            wait_for(lambda client=client: client.get("/version").status_code == 200, "an earlier one is still there")
        for path in ("/live", "/health"):
            assert httpx.get(f"{base}{path}", trust_env=False).status_code == 200
        refused = httpx.get(f"{base}/version", trust_env=False)
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "overloaded"
        assert refused.headers["connection"] == "close"
        assert clients[0].get("/version").status_code == 200
    wait_for(lambda: _all_are_served(base), "the places did not become free")
    assert metric(base, "admission_rejections_total", reason="connections") > before


def test_the_process_may_have_as_many_descriptors_as_connections() -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 300 + OTHER_DESCRIPTORS:
        pytest.skip("this machine gives a process too few descriptors")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256 + OTHER_DESCRIPTORS), most))
        allow_connections(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300 + OTHER_DESCRIPTORS, most)
        allow_connections(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300 + OTHER_DESCRIPTORS, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
