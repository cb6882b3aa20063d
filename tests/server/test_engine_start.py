"""How an engine's process starts, and that it ends with the server in every case."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model.exactness import ExactnessCheck, ExactnessReport
from model.interface import ModelInfo
from scheduler.audit import AuditConfig
from scheduler.config import SchedulerConfig
from scheduler.remote.messages import Status, frame
from server.description import EngineDescription
from server.remote.hello import Begin, Hello, Line, Listener, Ready, Refused, say
from server.remote.process import ChildProcess
from server.remote.start import _wait_ready
from server.settings import SECRETS
from server.start_error import StartError
from tests.server import engine_children
from tests.server.builders import build_settings
from tests.server.test_worker import is_running

ROOT = Path(__file__).parents[2]
DESCRIPTION = EngineDescription(
    names=("m", "n"),
    model=ModelInfo("m", "A", "a", "bfloat16", "cpu", 2, 64, 340, 341, 512, (0, 2), "abc"),
    exactness=ExactnessReport("L2", (ExactnessCheck("17 rows", False, "2 differ"),), "detail", (1, 16), "tiles", True),
    fingerprint="fp_1",
    created=17,
    executor="generic/torch",
    kernels={"setting": "torch"},
    scheduler=SchedulerConfig(max_num_seqs=2, audit=AuditConfig(0.5, exact=False, near_tie=0.25)),
    num_blocks=64,
    audit_blocks=8,
    block_size=16,
    kv_bytes=2**40,
    num_planes=4,
    drafters=("auto", "ngram"),
    drafting=("ngram", "grammar"),
    remembering=("suffix",),
    no_grammars="because",
)


class Fake:
    """The other side of a start, played by a thread."""

    def __init__(self, play: Callable[[socket.socket, Begin], object]) -> None:
        self.sock, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._play, args=(play,), daemon=True)
        self._thread.start()

    def _play(self, play: Callable[[socket.socket, Begin], object]) -> None:
        with self._theirs:
            begin = Listener(self._theirs).next()
            assert isinstance(begin, Begin)
            play(self._theirs, begin)

    def wait(self, timeout: float) -> int:
        self._thread.join(30)
        return -9


Play = Callable[[socket.socket, Begin], object]
Start = Callable[..., tuple[Ready, list[str], Fake]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts what is played, with these settings."""
    fakes: list[Fake] = []

    def started(play: Play, **settings: Any) -> tuple[Ready, list[str], Fake]:
        fakes.append(Fake(play))
        lines: list[str] = []
        return _wait_ready(fakes[-1], build_settings(**settings), lines.append), lines, fakes[-1]  # type: ignore[arg-type]

    yield started
    for fake in fakes:
        fake.wait(30)
        fake.sock.close()


def saying(*messages: Hello) -> Play:
    def play(sock: socket.socket, begin: Begin) -> None:
        for message in messages:
            say(sock, message)

    return play


def test_what_is_reported_and_what_the_engine_is_arrive_as_they_were(start: Start) -> None:
    ready = Ready(DESCRIPTION, "/folder", {"audit": None, "speculation": {"drafters": []}})
    found, lines, _ = start(saying(Line("loading"), Line("\u4eca"), ready))
    assert found == ready
    assert lines == ["loading", "\u4eca"]


def test_no_byte_behind_the_start_is_taken(start: Start) -> None:
    ready = Ready(DESCRIPTION, "/folder", {})

    def play(sock: socket.socket, begin: Begin) -> None:
        say(sock, ready)
        sock.sendall(b"next")

    _, _, fake = start(play)
    fake.wait(30)
    assert fake.sock.recv(100) == b"next"


def test_the_settings_arrive_without_the_secrets(start: Start) -> None:
    begun: list[Begin] = []

    def play(sock: socket.socket, begin: Begin) -> None:
        begun.append(begin)
        say(sock, Ready(DESCRIPTION, "", {}))

    changes = {"ssl_certfile": "/cert", "ssl_keyfile_password": "geheim", "kv_cache_memory": None, "max_num_seqs": 3}
    start(play, **changes)
    (begin,) = begun
    assert all(begin.settings[name] is None for name in SECRETS)
    assert "geheim" not in str(begin)
    arrived = build_settings(**{**begin.settings, "ssl_keyfile_password": "geheim"})
    assert arrived.model_dump() == build_settings(**changes).model_dump()


@pytest.mark.parametrize(
    ("play", "match"),
    [
        (saying(Line("loading"), Refused("there is no such model")), "^there is no such model$"),
        (saying(Line("loading")), r"ended before it was ready \(exit code -9\)"),
        (saying(Begin({})), "cannot be used"),
        (lambda sock, begin: sock.sendall(frame(b"nonsense")), "cannot be used"),
        (lambda sock, begin: sock.sendall(b"\xff\xff\xff\xff"), "cannot be used"),
    ],
    ids=["refused", "ended", "begin", "nonsense", "length"],
)
def test_a_start_that_fails_is_one_line(start: Start, play: Any, match: str) -> None:
    with pytest.raises(StartError, match=match):
        start(play)


def test_a_status_before_anything_was_said_is_that_of_an_idle_engine() -> None:
    assert Status().idle
    assert Status().unhealthy_reason is None


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    found = ChildProcess(engine_children.NAME)
    assert found.sock.recv(1) == b"!"
    yield found
    found.end()
    assert not is_running(found.pid)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline, "the process is left"
        time.sleep(0.02)


def test_a_process_that_heeds_nothing_is_ended(child: ChildProcess) -> None:
    assert child.wait(0.0) is None
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(0.05) is None
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    child.kill()  # nothing happens


def test_a_stopped_process_is_ended(child: ChildProcess) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    child.kill()
    assert child.wait(60) == -signal.SIGKILL


def test_secrets_of_the_server_are_not_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRUEDRAFT_API_KEYS", "TRUEDRAFT_SSL_KEYFILE_PASSWORD", "TRUEDRAFT_HOME"):
        monkeypatch.setenv(name, "x")
    child = ChildProcess(engine_children.NAME)
    try:
        child.sock.sendall(b"e")
        said = b""
        while not said.endswith(b"\0"):
            said += child.sock.recv(2**16)
    finally:
        child.end()
    names = said.decode().lstrip("!").rstrip("\0").split("\n")
    assert "TRUEDRAFT_HOME" in names
    assert not {"TRUEDRAFT_API_KEYS", "TRUEDRAFT_SSL_KEYFILE_PASSWORD"} & set(names)


@pytest.mark.parametrize("module", [[], ["tests.server.busy_engine_child"]], ids=["ready", "still imports"])
def test_a_server_that_is_killed_takes_its_engine_with_it(module: list[str]) -> None:
    command = [sys.executable, "-m", engine_children.NAME, *module]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_running(pid)
        server.kill()
        server.wait(60)
        wait_gone(pid)


def test_a_terminal_that_stops_who_writes_in_the_background_does_not_stop_it() -> None:
    controller, terminal = os.openpty()
    try:
        attributes = termios.tcgetattr(terminal)
        attributes[3] |= termios.TOSTOP
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        own = "import fcntl, runpy, termios; fcntl.ioctl(2, termios.TIOCSCTTY, 0); "
        program = f"{own} runpy.run_module({engine_children.NAME!r}, run_name='__main__')"
        command = [sys.executable, "-c", program]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=terminal, cwd=ROOT, start_new_session=True
        ) as server:
            assert server.stdout is not None
            try:
                assert select.select([server.stdout], [], [], 60)[0], "it is stopped"
                assert is_running(int(server.stdout.readline()))
            finally:
                server.kill()
        assert b"an engine's process" in os.read(controller, 1000)
    finally:
        os.close(controller)
        os.close(terminal)


def test_a_terminals_interrupt_is_for_the_server_alone(child: ChildProcess) -> None:
    assert os.getpgid(child.pid) != os.getpgid(0)
