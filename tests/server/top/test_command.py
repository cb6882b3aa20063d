"""`truedraft top` against a real server: once as plain text, and in a terminal that comes and goes."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cli import main
from server.commands import CommandError
from server.top.client import ServerAway, UiClient
from tests.server.builders import MODEL_NAME, build_service, running
from tests.server.test_access import ALICE, KEYS

ROOT = Path(__file__).parents[3]
PATIENCE = 60.0


def work(http: httpx.Client) -> None:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": "0 1 2 0 1 2 0", "max_tokens": 30, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_once_prints_the_state_and_ends(base: str, http: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    work(http)
    assert main(["top", "--url", base, "--once"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["model"].startswith(MODEL_NAME)
    assert lines["server"].endswith("ready")
    assert "c" in lines["KV block map"]
    assert "verify" in lines["step ms"]
    assert "tokens" in lines["finished"]


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://127.0.0.1:1", "does not answer"),
        ("ftp://127.0.0.1", "no address of a server"),
        ("http://", "no address of a server"),
        ("http://127.0.0.1:x", "no address of a server"),
    ],
)
def test_a_server_that_cannot_be_asked_is_one_line(url: str, match: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--once"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert match in line


def test_a_path_in_front_is_kept(base: str) -> None:
    with pytest.raises(CommandError, match="no /ui"):
        UiClient(f"{base}/below/", None).state()


def test_what_is_no_truedraft_server_is_told(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = UiClient(base, None)
    monkeypatch.setattr(client, "_get", lambda connection, path: _Answer(b"[]"))
    with pytest.raises(ServerAway, match="no state"):
        client.state()
    monkeypatch.setattr(client, "_get", lambda connection, path: _Answer(b"<html>"))
    with pytest.raises(ServerAway, match="does not answer"):
        client.state()


class _Answer:
    def __init__(self, body: bytes) -> None:
        self._body = body

    def read(self) -> bytes:
        return self._body


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, model_home: Path) -> Iterator[str]:
    with running(build_service(tiny_model, model_home, keys=KEYS)) as url:
        yield url


def test_the_key_comes_from_the_variable_that_is_named(
    keyed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRUEDRAFT_API_KEY", raising=False)
    assert main(["top", "--url", keyed, "--once"]) == 1
    assert "wants an API key; name the variable that holds it with --api-key-env" in capsys.readouterr().err
    monkeypatch.setenv("OTHER", f"{ALICE}x")
    assert main(["top", "--url", keyed, "--once", "--api-key-env", "OTHER"]) == 1
    told = capsys.readouterr().err
    assert "does not take the API key" in told
    assert ALICE not in told
    monkeypatch.setenv("OTHER", f"  {ALICE}\n")
    assert main(["top", "--url", keyed, "--once", "--api-key-env", "OTHER"]) == 0
    assert ALICE not in capsys.readouterr().out
    monkeypatch.setenv("OTHER", "schl\u00fcssel")
    assert main(["top", "--url", keyed, "--once", "--api-key-env", "OTHER"]) == 1
    assert "OTHER" in capsys.readouterr().err


def test_without_a_terminal_it_says_how_to_do_without(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", base]) == 1
    assert "--once" in capsys.readouterr().err


class Terminal:
    """A terminal of 120 columns in which `truedraft top` runs."""

    def __init__(self, url: str) -> None:
        ours, theirs = pty.openpty()
        self._terminal = ours
        environment = {**os.environ, "COLUMNS": "120", "LINES": "50", "TERM": "xterm-256color"}
        code = "import sys; from server.cli import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "top", "--url", url],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def read_until(self, *words: str) -> None:
        """What has been shown since the start holds them all."""
        deadline = time.monotonic() + PATIENCE
        while not all(word in self.shown for word in words):
            assert time.monotonic() < deadline, self.shown[-4000:]
            assert self.process.poll() is None, self.shown[-4000:]
            if select.select([self._terminal], [], [], 0.2)[0]:
                self.shown += os.read(self._terminal, 65536).decode("utf-8", "replace")

    def press(self, key: str) -> None:
        os.write(self._terminal, key.encode())

    def ended(self) -> int:
        """Its exit code; what it still writes is read, or it could not end."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.shown[-4000:]
            try:
                if select.select([self._terminal], [], [], 0.2)[0]:
                    self.shown += os.read(self._terminal, 65536).decode("utf-8", "replace")
            except OSError:  # nobody holds the other end any more
                self.process.wait(PATIENCE)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        os.close(self._terminal)


@pytest.fixture
def terminal(base: str) -> Iterator[Terminal]:
    opened = Terminal(base)
    try:
        yield opened
    finally:
        opened.close()


def test_it_draws_what_goes_on_until_q_is_pressed(terminal: Terminal, http: httpx.Client) -> None:
    terminal.read_until(MODEL_NAME, "ready", "KV cache")
    work(http)
    terminal.read_until("accepted up to position", "finished, newest first")
    terminal.press("x")
    terminal.press("q")
    assert terminal.ended() == 0
    assert "\x1b[?1049l" in terminal.shown, "the terminal is left as it was"


def test_ctrl_c_ends_it_as_well(terminal: Terminal) -> None:
    terminal.read_until(MODEL_NAME)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ended() == 0
    assert "Traceback" not in terminal.shown


def test_it_stays_and_tells_when_the_server_goes_away(tiny_model: Path, model_home: Path) -> None:
    service = build_service(tiny_model, model_home)
    opened = None
    try:
        with running(service) as base:
            opened = Terminal(base)
            opened.read_until("ready")
            service.draining = True  # or its feed would keep the server
        opened.read_until("does not answer")
        opened.press("q")
        assert opened.ended() == 0
    finally:
        if opened is not None:
            opened.close()
