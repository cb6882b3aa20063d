"""Children never outlive what started them."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from model.children import Children, ChildrenEnded, end_all_children

# A child with a child of its own, which ignores SIGTERM; says when both are there.
STUBBORN = "trap '' TERM; sleep 600 & echo there > \"$1\"; wait; sleep 600"


def alive(mark: str) -> list[str]:
    """Command lines of processes that hold ``mark`` in an argument."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(mark.encode() in word for word in words[1:]):
            found.append(b" ".join(words).decode("utf-8", "replace"))
    return found


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_the_result_has_the_exit_code_and_stderr() -> None:
    with Children() as children:
        (done,) = children.run_all([lambda: children.run(["sh", "-c", "echo wrong >&2; exit 3"])])
    assert (done.returncode, done.stderr) == (3, "wrong\n")


def test_results_come_in_the_order_of_the_jobs() -> None:
    with Children() as children:
        assert children.run_all([lambda i=i: time.sleep(0.02 * (3 - i)) or i for i in range(4)], at_once=4) == [
            0,
            1,
            2,
            3,
        ]


def test_a_job_that_fails_ends_the_others(tmp_path: Path) -> None:
    there = tmp_path / "there"

    def failing() -> None:
        wait_for(there)
        raise OSError("no")

    with Children() as children, pytest.raises(OSError, match="no"):
        children.run_all([lambda: children.run(["sh", "-c", STUBBORN, "sh", str(there)]), failing], at_once=2)
    assert alive(str(there)) == []


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with Children() as children, pytest.raises(subprocess.TimeoutExpired):
        children.run_all([lambda: children.run(["sh", "-c", "sleep 600", str(tmp_path)], timeout=0.2)])
    assert alive(str(tmp_path)) == []


_PARENT = """
import sys
from model.children import Children

with Children() as children:
    children.run_all([lambda: children.run(sys.argv[1:])])
"""


def test_no_child_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    there = tmp_path / "there"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, "sh", "-c", STUBBORN, "sh", str(there)])
    try:
        wait_for(there)
        assert len(alive(str(there))) >= 2  # itself, and the shell; sleep does not name it
    finally:
        parent.kill()
        parent.wait(30)
    deadline = time.monotonic() + 30
    while alive(str(there)):
        assert time.monotonic() < deadline, "a child is left"
        time.sleep(0.01)


def test_who_leaves_without_unwinding_can_end_all_children_from_any_thread(tmp_path: Path) -> None:
    there = tmp_path / "there"

    def leave() -> None:
        wait_for(there)
        end_all_children()

    thread = threading.Thread(target=leave)
    with Children() as children:
        thread.start()
        (done,) = children.run_all([lambda: children.run(["sh", "-c", STUBBORN, "sh", str(there)])])
        thread.join()
        assert done.returncode == -signal.SIGKILL
        assert alive(str(there)) == []
        with pytest.raises(ChildrenEnded):
            children.run_all([lambda: children.run(["true"])])


def test_a_signal_at_any_moment_leaves_no_child_and_is_not_missed(tmp_path: Path) -> None:
    """A chatty child, so that whoever reads it goes in and out of system calls all the time."""
    script = (
        "import sys\n"
        "from model.children import Children, end_all_children\n"
        "from server.ending import Ended, ended_by_signals\n"
        "command = ['sh', '-c', 'while :; do echo line >&2; sleep 0.001; done', sys.argv[1]]\n"
        "with ended_by_signals(lambda line: None, end_all_children) as tell:\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        with Children() as children:\n"
        "            children.run_all([lambda: children.run(command)])\n"
        "    except Ended as ended:\n"
        "        print('unwound', flush=True)\n"
        "        sys.exit(tell(ended.number))\n"
    )
    rng = random.Random(1)
    for i in range(12):
        mark = f"{tmp_path}/{i}"
        with subprocess.Popen([sys.executable, "-c", script, mark], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGTERM)
            # "unwound": the signal came through by itself, and not by the grace period's end.
            assert process.stdout.read() == "unwound\n"
            assert process.wait() == 143
        assert [line for line in alive(mark) if "import sys" not in line] == []
