"""Connections of clients who say nothing, or do not read: closed in time; and too many of them: refused."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlparse

import h11
import httpx
import pytest

from server.connections import (
    MIN_CHUNK_BYTES,
    OTHER_DESCRIPTORS,
    READ_BYTES_PER_SECOND,
    SMALL_CHUNKS,
    BoundedParser,
    BoundedProtocol,
    allow_connections,
)
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


def test_far_too_many_connections_are_closed_at_once(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.connections.SPARE_CONNECTIONS", 2)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 2):
            stack.enter_context(connection(base))
        wait_for(lambda: _closed_at_once(base), "it is kept")
    wait_for(lambda: _all_are_served(base), "the places did not become free")


def _closed_at_once(base: str) -> bool:
    with connection(base) as sock, contextlib.suppress(ConnectionResetError):
        sock.settimeout(0.1)
        try:
            return sock.recv(1) == b""
        except TimeoutError:
            return False
    return True


class Transport:
    """As far as a reader who is behind is concerned."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.size

    def abort(self) -> None:
        self.aborted = True


class Loop:
    """Calls when a test says that the time has come."""

    def __init__(self) -> None:
        self.due: Callable[[], None] | None = None

    def call_later(self, seconds: float, function: Callable[..., None], *args: object) -> object:
        self.due = partial(function, *args)
        return None


@pytest.mark.parametrize(
    ("read", "kept"),
    [(0.0, False), (0.5, False), (0.99, False), (1.0, True), (3.0, True)],
    ids=lambda value: str(value),
)
def test_a_reader_who_is_behind_has_to_read_so_much_in_each_span_of_time(read: float, kept: bool) -> None:
    share = int(READ_BYTES_PER_SECOND * 2.0)
    protocol = BoundedProtocol.__new__(BoundedProtocol)
    protocol.transport, protocol.loop = Transport(10 * share), Loop()  # type: ignore[assignment]
    protocol._send_timeout, protocol._send_timer = 2.0, None
    protocol._await_reader()
    for _ in range(3):
        protocol.transport.size -= int(read * share)  # type: ignore[attr-defined]
        protocol.loop.due()  # type: ignore[attr-defined]
        protocol._send_timer = None
        assert protocol.transport.aborted is not kept  # type: ignore[attr-defined]
        if not kept:
            break


def test_a_reader_who_has_all_of_it_need_not_read_more() -> None:
    protocol = BoundedProtocol.__new__(BoundedProtocol)
    protocol.transport, protocol.loop = Transport(7), Loop()  # type: ignore[assignment]
    protocol._send_timeout, protocol._send_timer = 2.0, None
    protocol._await_reader()
    protocol.transport.size = 0  # type: ignore[attr-defined]
    protocol.loop.due()  # type: ignore[attr-defined]
    assert not protocol.transport.aborted  # type: ignore[attr-defined]


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("num_bytes", "size", "status"),
    [(SMALL_CHUNKS, 1, 200), (SMALL_CHUNKS + 9, 1, 400), (200_000, MIN_CHUNK_BYTES, 200), (200_000, 32, 400)],
)
def test_a_body_in_crumbs_is_refused_and_one_in_chunks_is_not(
    base: str, num_bytes: int, size: int, status: int
) -> None:
    body = f'{{"model": "{MODEL_NAME}", "prompt": "a", "max_tokens": 1}}'.encode().ljust(num_bytes)
    with connection(base) as sock:
        sock.sendall(f"{POST}Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunked(body, size))
        assert read_all(sock).startswith(f"HTTP/1.1 {status}".encode())


def test_crumbs_behind_an_early_answer_close_the_connection(base: str) -> None:
    with connection(base) as sock:
        sock.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        assert sock.recv(12) == b"HTTP/1.1 404"
        with contextlib.suppress(ConnectionError):
            sock.sendall(chunked(b"a" * 100_000, 1)[:-5])
        read_all(sock)


@pytest.mark.parametrize("target", ["/live", "/live?" + "x" * 70_000])
def test_a_head_that_comes_as_a_whole_is_bounded_too(target: str) -> None:
    parser = BoundedParser(65_536)
    many = "".join(f"X-{i}: y\r\n" for i in range(8_000)) if target == "/live" else ""
    parser.receive_data(f"GET {target} HTTP/1.1\r\nHost: x\r\n{many}\r\n".encode())
    with pytest.raises(h11.RemoteProtocolError, match="head is too long"):
        parser.next_event()


def test_garbage_behind_an_early_answer_closes_the_connection_quietly(
    base: str, caplog: pytest.LogCaptureFixture
) -> None:
    head = "POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connection(base) as sock:
        sock.sendall(head.encode() + b"1\r\na\r\n")
        assert sock.recv(12) == b"HTTP/1.1 404"
        sock.sendall(b"no chunk\r\n\r\n")
        read_all(sock)
    assert not [record for record in caplog.records if record.exc_info]


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
