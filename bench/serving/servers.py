"""Servers of our own for a run: children on free ports, ended with it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.process import ServerStartError, free_port, wait_ready
from server.commands import CommandError

START_SECONDS = 900.0  # kernels may be compiled at the first start
END_SECONDS = 30.0
LOG_LINES = 8


@dataclass(frozen=True, slots=True)
class Child:
    """``flags`` are those of serve, ``log`` its output."""

    name: str
    url: str
    flags: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ended(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    def last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])


@contextlib.contextmanager
def start_servers(named_flags: Sequence[tuple[str, Sequence[str]]], folder: Path) -> Iterator[list[Child]]:
    """``truedraft serve`` for each name and its flags, one after the other, so that no start-up measurement of one
    meets the work of another. All are ended when the block is left. Raises CommandError, one line, for one that does
    not get ready."""
    with contextlib.ExitStack() as stack:
        children: list[Child] = []
        for i, (name, flags) in enumerate(named_flags):
            port, log = free_port(), folder / f"server-{i}.log"
            command = [sys.executable, "-m", "server", "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
            with log.open("wb") as out:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            child = Child(name, f"http://127.0.0.1:{port}", tuple(flags), process, log)
            stack.callback(_end, process)
            try:
                wait_ready(process, child.url, log, START_SECONDS)
            except ServerStartError as error:
                last = [line for line in child.last_words().splitlines() if line.strip()]
                reason = last[-1] if last else "it said nothing"
                raise CommandError(f"the server {name} did not get ready: {reason}") from error
            children.append(child)
        yield children


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
