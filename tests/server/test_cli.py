"""The command line: one line and exit code 1 for a mistake, a graceful end for a signal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server.cli import main
from tests.server.builders import CONTEXT, MODEL_NAME


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "server", *map(str, arguments)]


@pytest.fixture
def environment(model_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("TRUEDRAFT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRUEDRAFT_HOME", str(model_home))
    monkeypatch.setenv("TRUEDRAFT_KERNELS", "off")  # or the first start in a fresh home builds them
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # ``serve`` points the log of the whole process at stderr.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@contextlib.contextmanager
def server(model: Path, *flags: object) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server process, its URL from the start-up line, and the lines it has written to stderr."""
    arguments = command(
        "serve", "--model", model, "--served-model-name", MODEL_NAME, "--port", 0, "--executor", "generic",
        "--num-blocks", 64, "--num-threads", 1, "--max-num-batched-tokens", 128, *flags,
    )  # fmt: skip
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        for line in process.stderr or ():
            lines.append(line.rstrip("\n"))
            if "on http://" in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert found.wait(120), lines
        started = [line for line in lines if "on http://" in line]
        assert started, lines
        yield process, started[0].rsplit(" on ", 1)[1], lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(10)
        process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["serve", "--port", "x"], "port = 'x'"),
        (["serve", "--nonsense", "1"], "--nonsense"),
        (["serve", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["nonsense"], "nonsense"),
        ([], "command"),
        (["serve", "--model", "/nowhere/at/all", "--port", "0"], "/nowhere/at/all"),
        (["serve", "--host", "no.such.host.invalid", "--port", "0"], "no.such.host.invalid"),
        (["fetch", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("environment")
def test_a_mistake_is_one_line_and_exit_code_1(
    arguments: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    shown = capsys.readouterr()
    assert code == 1
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if "error: " in line]
    assert len(errors) == 1
    assert match in errors[0]
    assert "Traceback" not in shown.err


@pytest.mark.usefixtures("environment")
def test_a_port_in_use_is_told_before_the_model_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model", "/nowhere/at/all", "--port", str(port)]) == 1
    assert f"127.0.0.1:{port}: the port is in use" in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
def test_a_drafter_or_a_context_that_does_not_exist_is_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["serve", "--model", str(tiny_model), "--port", "0", "--executor", "generic", "--num-blocks", "8"]
    assert main([*flags, "--drafter", "oracle"]) == 1
    assert "oracle" in capsys.readouterr().err
    assert main([*flags, "--max-model-len", str(CONTEXT + 1)]) == 1
    assert str(CONTEXT + 1) in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("truedraft ")


@pytest.mark.usefixtures("environment")
def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(tiny_model: Path) -> None:
    with server(tiny_model, "--log-format", "json") as (process, base, lines):
        (started,) = [line for line in lines if "on http://" in line]
        for fact in ("exactness L0", "generic", "64 KV blocks of 16 tokens"):
            assert fact in started
        body = {"model": MODEL_NAME, "prompt": "SECRET", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=base, timeout=60) as client, httpx.Client(base_url=base, timeout=60) as other:
            other.get("/live")
            with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "long"}) as response:
                pieces = response.iter_raw()
                received = next(pieces)
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + 20
                while (health := other.get("/health")).status_code == 200:
                    assert time.monotonic() < deadline
                refused = other.post("/v1/completions", json={**body, "stream": False})
                received += b"".join(pieces)
        assert health.json()["error"]["message"] == "the server is shutting down"
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        assert received.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in received
        assert process.wait(60) == 0
        logged = [json.loads(line) for line in lines if line.startswith("{")]
        assert any(entry.get("request_id") == "long" and entry["status"] == 200 for entry in logged)
        assert "SECRET" not in "\n".join(lines)


@pytest.mark.usefixtures("environment")
def test_what_does_not_finish_in_time_is_ended_with_an_error_and_done(tiny_model: Path) -> None:
    with server(tiny_model, "--shutdown-timeout", "0") as (process, base, _):
        body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as response:
            pieces = response.iter_raw()
            received = next(pieces)
            process.send_signal(signal.SIGINT)
            received += b"".join(pieces)
        assert received.endswith(b"\n\ndata: [DONE]\n\n")
        assert b'"code":"shutting_down"' in received
        assert process.wait(60) == 0
