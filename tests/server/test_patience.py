"""Clients that are too slow: bounded in time and memory, and nobody else waits for them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest

from tests.server.builders import MODEL_NAME, build_service, metric, running
from tests.server.test_disconnect import assert_idle, send, wait_for


@pytest.fixture(scope="module")
def hasty(tiny_model: Path, model_home: Path) -> Iterator[str]:
    service = build_service(tiny_model, model_home, body_timeout=0.3, send_timeout=0.5)
    with running(service, send_buffer=4096) as base:
        yield base


def test_a_body_that_does_not_arrive_is_a_408(hasty: str) -> None:
    url = urlparse(hasty)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    with socket.create_connection((url.hostname or "", url.port or 0), timeout=20) as sock:
        sock.sendall(head)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


def test_a_reader_who_never_reads_is_aborted_and_its_blocks_come_back(hasty: str) -> None:
    sock = send(hasty, receive_buffer=4096, prompt="a", max_tokens=500, stream=True, logprobs=20)
    wait_for(lambda: metric(hasty, "request_success_total", finished_reason="abort") == 1, "it was not aborted")
    assert_idle(hasty)
    sock.close()
    answer = httpx.post(
        f"{hasty}/v1/completions", json={"model": MODEL_NAME, "prompt": "b", "max_tokens": 3}, timeout=60
    )
    assert answer.status_code == 200
