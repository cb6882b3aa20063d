"""The server under test, with all its children: started, measured, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.process import free_port, wait_ready

STOP_SECONDS = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the machine; the start time tells it from a later one of the same number."""

    pid: int
    parent: int
    started: int  # clock ticks since the machine's start
    state: str

    @property
    def alive(self) -> bool:
        now = read_process(self.pid)
        return now is not None and now.started == self.started and now.state != "Z"


def read_process(pid: int) -> Process | None:
    """None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in front may hold anything
    return Process(pid, int(fields[1]), int(fields[19]), fields[0])


def descendants(pid: int) -> list[Process]:
    """Of process ``pid``, itself not included."""
    everyone = [read_process(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    found: list[Process] = []
    parents = {pid}
    while parents:
        children = [process for process in everyone if process is not None and process.parent in parents]
        found += children
        parents = {process.pid for process in children}
    return found


def resident_bytes(pid: int) -> int:
    """Memory that a process holds; 0 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except OSError:
        return 0


@dataclass(slots=True)
class ServerProcess:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    children: dict[int, Process] = field(default_factory=dict)  # every one that was ever seen

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def look(self) -> int:
        """Note the children that there are now; returns the bytes that all processes hold."""
        now = descendants(self.process.pid)
        self.children |= {child.pid: child for child in now}
        return sum(map(resident_bytes, (self.process.pid, *(child.pid for child in now))))

    def stop(self) -> int | None:
        """SIGTERM, and the exit code; None if it did not end in time (it is killed then)."""
        if self.running:
            self.look()
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def left_children(self, seconds: float = 5.0) -> list[int]:
        """Children that live on though the server has ended; they get a moment."""
        deadline = time.monotonic() + seconds
        while (left := [child.pid for child in self.children.values() if child.alive]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


@contextlib.contextmanager
def server_under_test(module: str, flags: Sequence[str], log: Path, *, ready_seconds: float) -> Iterator[ServerProcess]:
    """``python -m module serve`` with ``flags``, ready; whatever is left of it is killed in the end.

    Raises bench.process.ServerStartError.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as out:
        server = ServerProcess(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT), port, log)
        try:
            wait_ready(server.process, f"http://127.0.0.1:{port}", log, ready_seconds)
            server.look()
            yield server
        finally:
            if server.running:
                server.look()
                server.process.kill()
            server.process.wait()
            for child in server.children.values():
                if child.alive:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
