"""Clients that leave: at any moment, their requests end and their blocks come back."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from typing import Any
from urllib.parse import urlparse

import httpx
import pytest

from tests.server.builders import CONTEXT, MODEL_NAME, metric


def send(base: str, receive_buffer: int | None = None, **body: Any) -> socket.socket:
    """Send a request and return its socket, nothing read. ``receive_buffer``: bytes that the kernel takes meanwhile."""
    url = urlparse(base)
    payload = json.dumps({"model": MODEL_NAME, "ignore_eos": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n\r\n"
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(20)
    sock.connect((url.hostname or "", url.port or 0))
    sock.sendall(head.encode() + payload)
    return sock


def wait_for(condition: Any, what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(what)


def assert_idle(base: str) -> None:
    """Nothing runs, nothing waits, no block is held."""
    for name, labels in (
        ("num_requests_running", {}),
        ("num_requests_waiting", {}),
        ("kv_blocks", {"state": "used"}),
    ):
        wait_for(lambda name=name, labels=labels: metric(base, name, **labels) == 0, f"{name} {labels} is not 0")
    assert metric(base, "kv_alignment_bytes_moved_total") == 0
    assert metric(base, "kv_blocks_moved_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_in_decode_ends_the_request(base: str, stream: bool) -> None:
    before = metric(base, "request_success_total", finished_reason="abort")
    generated = metric(base, "generation_tokens_total")
    sock = send(base, prompt="the quick", max_tokens=CONTEXT - 20, stream=stream)
    wait_for(lambda: metric(base, "generation_tokens_total") > generated, "it never decoded")
    sock.close()
    wait_for(lambda: metric(base, "request_success_total", finished_reason="abort") == before + 1, "it was not aborted")
    assert_idle(base)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_at_once_ends_the_request(base: str, stream: bool) -> None:
    for _ in range(5):
        send(base, prompt=[70] * 400, max_tokens=100, stream=stream).close()
    assert_idle(base)


def test_leaving_while_queued_ends_the_request(base: str) -> None:
    # More choices than seats: some of them wait for as long as the others run.
    socks = [send(base, prompt=["a", "b"], n=4, max_tokens=400, stream=True) for _ in range(3)]
    wait_for(lambda: metric(base, "num_requests_waiting") > 0, "nothing waits")
    for sock in reversed(socks):
        sock.close()
    assert_idle(base)


def test_a_reader_who_does_not_read_does_not_hold_up_the_others(base: str, http: httpx.Client) -> None:
    sock = send(base, prompt="a", max_tokens=400, stream=True, logprobs=20)
    answer = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "b", "max_tokens": 5})
    assert answer.status_code == 200
    sock.close()
    assert_idle(base)


def test_many_clients_who_leave_at_random_leave_nothing_behind(base: str, http: httpx.Client) -> None:
    rng = random.Random(0)
    for _ in range(60):
        sock = send(
            base,
            prompt=[rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))],
            max_tokens=rng.randrange(1, 30),
            stream=rng.random() < 0.7,
            n=rng.randrange(1, 4),
        )
        if rng.random() < 0.5:
            sock.settimeout(0.02)
            with contextlib.suppress(TimeoutError):
                sock.recv(rng.randrange(1, 2000))
        sock.close()
    assert_idle(base)
    assert http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "b", "max_tokens": 3}).status_code == 200
