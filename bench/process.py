"""A real server in a process of its own, for benchmarks and end-to-end checks."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx


class ServerStartError(RuntimeError):
    """The server process ended or did not get ready in time; the message holds its last lines."""


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server_process(flags: Sequence[str], log: Path, *, timeout: float = 600.0, module: str = "server") -> Iterator[str]:
    """Run ``python -m server serve`` with ``flags`` on a free port; yields its base URL, ends it on exit.

    ``module`` is another program with the same command.
    """
    port = free_port()
    command = [sys.executable, "-m", module, "serve", "--host", "127.0.0.1", "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            wait_ready(process, f"http://127.0.0.1:{port}", log, timeout)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, timeout: float) -> None:
    """Until ``/health`` answers 200. Raises ServerStartError if the process ends or that takes too long."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    tail = log.read_text(errors="replace").splitlines()[-15:]
    raise ServerStartError("the server did not get ready:\n" + "\n".join(tail))
