"""A server with its engine in another process, from outside: neither of the two outlives the other."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.server.builders import MODEL_NAME
from tests.server.test_cli import environment as environment
from tests.server.test_cli import server
from tests.server.test_worker import is_running

BODY = {"model": MODEL_NAME, "prompt": "SECRET", "max_tokens": 100, "ignore_eos": True, "stream": True}


def children(pid: int) -> set[int]:
    """Processes that ``pid`` has started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.add(int(stat.parent.name))
    return found


def wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)


@pytest.mark.usefixtures("environment")
def test_a_server_whose_engine_dies_says_so_and_ends_with_exit_code_1(tiny_model: Path) -> None:
    with server(tiny_model, "--engine-process") as (process, base, lines):
        pids = children(process.pid)
        (engine,) = pids
        with (
            httpx.Client(base_url=base, timeout=60) as client,
            client.stream("POST", "/v1/completions", json={**BODY, "max_tokens": 480}) as response,
        ):
            pieces = response.iter_raw()
            received = next(pieces)
            os.kill(engine, signal.SIGKILL)
            received += b"".join(pieces)
        assert received.endswith(b"\n\ndata: [DONE]\n\n")
        assert b"the engine's process has ended" in received
        assert process.wait(60) == 1
        wait_gone(pids)
        assert "truedraft: the engine failed: the engine's process has ended, by SIGKILL" in lines
        assert not any("Traceback" in line for line in lines)


@pytest.mark.usefixtures("environment")
def test_no_process_outlives_a_server_that_is_killed(tiny_model: Path) -> None:
    with server(tiny_model, "--engine-process") as (process, base, _):
        grammar = {**BODY, "ignore_eos": False, "structured_outputs": {"regex": "[ab]{3}"}}
        with httpx.stream("POST", f"{base}/v1/completions", json=grammar, timeout=60) as response:
            assert b"".join(response.iter_raw()).endswith(b"data: [DONE]\n\n")
        pids = children(process.pid)
        assert len(pids) == 2  # the engine, and who checks grammars
        process.kill()
        process.wait(60)
        wait_gone(pids)


@pytest.mark.usefixtures("environment")
def test_a_signal_to_all_lets_requests_finish_and_leaves_no_process(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEDRAFT_SSL_KEYFILE_PASSWORD", "")
    with server(tiny_model, "--engine-process", "--shutdown-timeout", 240) as (process, base, lines):
        pids = children(process.pid)
        assert pids
        with httpx.Client(base_url=base, timeout=60) as client, httpx.Client(base_url=base, timeout=60) as other:
            other.get("/live")
            with client.stream("POST", "/v1/completions", json=BODY) as response:
                pieces = response.iter_raw()
                received = next(pieces)
                for pid in (process.pid, *pids):  # as a service manager does that ends all processes of a service
                    os.kill(pid, signal.SIGTERM)
                deadline = time.monotonic() + 60
                while other.get("/health").status_code == 200:
                    assert time.monotonic() < deadline
                refused = other.post("/v1/completions", json={**BODY, "stream": False})
                received += b"".join(pieces)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert received.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in received
        assert process.wait(60) == 0
        wait_gone(pids)
        assert not any("Traceback" in line or "SECRET" in line for line in lines)
