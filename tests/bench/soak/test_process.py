"""Processes and their children, as the soak looks at them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.soak.process import ServerProcess, descendants, read_process, resident_bytes

# A child with a child of its own, which outlives it if it is told to; both say their number.
_PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
sys.stdin.readline()
if sys.argv[1] == "ends":
    child.kill()
    child.wait()
os._exit(0)
"""


def start(how: str) -> tuple[ServerProcess, int]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _PARENT, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    own, child = map(int, process.stdout.readline().split())
    assert own == process.pid
    return ServerProcess(process, 0, Path("unused")), child


@pytest.fixture(params=["ends", "leaves its child"])
def family(request: pytest.FixtureRequest) -> Iterator[tuple[ServerProcess, int, str]]:
    server, child = start(request.param)
    yield server, child, request.param
    for stream in (server.process.stdin, server.process.stdout):
        assert stream is not None
        stream.close()
    server.process.kill()
    server.process.wait()
    for one in server.children.values():
        if one.alive:
            os.kill(one.pid, 9)


def test_children_of_children_are_seen_and_measured(family: tuple[ServerProcess, int, str]) -> None:
    server, child, _ = family
    assert [one.pid for one in descendants(server.process.pid)] == [child]
    assert child in [one.pid for one in descendants(os.getpid())]
    assert server.look() >= resident_bytes(server.process.pid) > 0
    assert list(server.children) == [child]


def test_a_child_that_stays_is_named(family: tuple[ServerProcess, int, str]) -> None:
    server, child, how = family
    server.look()
    assert server.process.stdin is not None
    server.process.stdin.write(b"\n")
    server.process.stdin.flush()
    assert server.process.wait(60) == 0
    assert server.left_children(seconds=0.2) == ([] if how == "ends" else [child])


def test_a_process_that_is_gone_is_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    found = read_process(process.pid)
    assert found is not None
    process.wait()
    assert not found.alive
    assert read_process(process.pid) is None
    assert resident_bytes(process.pid) == 0
