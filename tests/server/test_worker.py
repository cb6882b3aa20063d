"""The worker: calls end in time and in order, whatever the child does, and no child is ever left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.worker import WorkerCrashed, WorkerError, WorkerProcess, WorkerTimeout

FUNCTIONS = "tests.server.worker_functions"
LONG = 120.0  # seconds: longer than any of these tests


@contextlib.asynccontextmanager
async def open_worker(module: str = FUNCTIONS, memory_bytes: int | None = None) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(module, memory_bytes=memory_bytes)
    try:
        yield worker
    finally:
        worker.close()


def is_running(pid: int) -> bool:
    """A zombie is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until_gone(pid: int) -> None:
    while is_running(pid):  # noqa: ASYNC110 - nobody tells us of another process's end
        await asyncio.sleep(0.01)


async def started(worker: WorkerProcess) -> int:
    await worker.start()
    assert worker.pid is not None
    return worker.pid


async def _one_child_answers_call_after_call() -> None:
    async with open_worker() as worker:
        pid = await started(worker)
        assert await worker.call("add", 1, 2, timeout=LONG) == 3
        assert await worker.call("add", "a", "b", timeout=LONG) == "ab"
        assert worker.pid == pid
        assert {"torch", "pydantic", "server.settings"}.isdisjoint(await worker.call("modules", timeout=LONG))


async def _a_call_that_holds_the_interpreter_is_killed_and_the_next_one_works() -> None:
    async with open_worker() as worker:
        pid = await started(worker)
        with pytest.raises(WorkerTimeout, match=r"0\.2 s"):
            await worker.call("hold_the_interpreter", timeout=0.2)
        assert not is_running(pid)
        assert await worker.call("add", 1, 2, timeout=LONG) == 3


async def _a_value_error_is_one_line_and_costs_no_child() -> None:
    async with open_worker() as worker:
        pid = await started(worker)
        with pytest.raises(WorkerError, match=r"^no good$"):
            await worker.call("refuse", "no good\n  at line 3", timeout=LONG)
        assert await worker.call("add", 1, 2, timeout=LONG) == 3
        assert worker.pid == pid


async def _a_child_that_dies_or_fails_hurts_only_its_call(function: str) -> None:
    async with open_worker() as worker:
        doomed = asyncio.create_task(worker.call(function, timeout=LONG))
        waiting = asyncio.create_task(worker.call("add", 1, 2, timeout=LONG))
        with pytest.raises(WorkerCrashed) as failure:
            await doomed
        assert "client" not in str(failure.value)
        assert await waiting == 3


async def _a_child_that_was_killed_between_calls_is_replaced_and_costs_none() -> None:
    async with open_worker() as worker:
        pid = await started(worker)
        os.kill(pid, signal.SIGKILL)
        await until_gone(pid)
        assert await worker.call("add", 1, 2, timeout=LONG) == 3
        assert worker.pid != pid


async def _a_child_has_the_environment_without_secrets() -> None:
    async with open_worker() as worker:
        found = await worker.call("environment", timeout=LONG)
    assert found["TRUEDRAFT_HOST"] == "seen"
    assert not [name for name, value in found.items() if value == "secret"]


async def _memory_is_bounded() -> None:
    async with open_worker(memory_bytes=512 * 2**20) as worker:
        assert await worker.call("allocate", 2**20, timeout=LONG) == 2**20
        with pytest.raises(WorkerCrashed, match="out of memory"):
            await worker.call("allocate", 2**30, timeout=LONG)
        assert await worker.call("add", 1, 2, timeout=LONG) == 3


async def _calls_run_in_the_order_in_which_they_were_made_and_the_cancelled_not_at_all() -> None:
    async with open_worker() as worker:
        ended: list[int] = []

        async def one(i: int) -> None:
            await worker.call("add", i, 0, timeout=LONG)
            ended.append(i)

        await worker.start()
        first = asyncio.create_task(worker.call("sleep", 0.2, timeout=LONG))
        await asyncio.sleep(0)
        gone = asyncio.create_task(worker.call("hold_the_interpreter", timeout=LONG))
        rest = [asyncio.create_task(one(i)) for i in range(8)]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(first, *rest)
        assert ended == list(range(8))


async def _close_ends_the_child_the_call_and_those_that_wait() -> None:
    async with open_worker() as worker:
        pid = await started(worker)
        calls = [asyncio.create_task(worker.call("hold_the_interpreter", timeout=LONG)) for _ in range(2)]
        await asyncio.sleep(0.05)
        worker.close()
        worker.close()
        assert not is_running(pid)
        for call in calls:
            with pytest.raises(WorkerCrashed):
                await call
        with pytest.raises(WorkerCrashed, match="closed"):
            await worker.call("add", 1, 2, timeout=LONG)


async def _a_module_that_cannot_be_imported_is_said() -> None:
    async with open_worker("tests.server.no_such_module") as worker:
        for _ in range(2):
            with pytest.raises(WorkerCrashed, match="did not start: ModuleNotFoundError"):
                await worker.call("add", 1, 2, timeout=LONG)


async def _a_worker_that_is_forgotten_leaves_no_child() -> None:
    worker = WorkerProcess(FUNCTIONS)
    pid = await started(worker)
    del worker
    await until_gone(pid)


def test_one_child_answers_call_after_call() -> None:
    asyncio.run(_one_child_answers_call_after_call())


def test_a_call_that_holds_the_interpreter_is_killed_and_the_next_one_works() -> None:
    asyncio.run(_a_call_that_holds_the_interpreter_is_killed_and_the_next_one_works())


def test_a_value_error_is_one_line_and_costs_no_child() -> None:
    asyncio.run(_a_value_error_is_one_line_and_costs_no_child())


@pytest.mark.parametrize("function", ["die", "fail"])
def test_a_child_that_dies_or_fails_hurts_only_its_call(function: str) -> None:
    asyncio.run(_a_child_that_dies_or_fails_hurts_only_its_call(function))


def test_a_child_that_was_killed_between_calls_is_replaced_and_costs_none() -> None:
    asyncio.run(_a_child_that_was_killed_between_calls_is_replaced_and_costs_none())


def test_a_child_has_the_environment_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOST", "seen")
    for name in (
        "TRUEDRAFT_SSL_KEYFILE_PASSWORD",
        "truedraft_ssl_keyfile_password",
        "TRUEDRAFT_API_KEYS",
        "TRUEDRAFT_API_KEY",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    ):
        monkeypatch.setenv(name, "secret")
    asyncio.run(_a_child_has_the_environment_without_secrets())


def test_memory_is_bounded() -> None:
    asyncio.run(_memory_is_bounded())


def test_calls_run_in_the_order_in_which_they_were_made_and_the_cancelled_not_at_all() -> None:
    asyncio.run(_calls_run_in_the_order_in_which_they_were_made_and_the_cancelled_not_at_all())


def test_close_ends_the_child_the_call_and_those_that_wait() -> None:
    asyncio.run(_close_ends_the_child_the_call_and_those_that_wait())


def test_a_module_that_cannot_be_imported_is_said() -> None:
    asyncio.run(_a_module_that_cannot_be_imported_is_said())


def test_a_worker_that_is_forgotten_leaves_no_child() -> None:
    asyncio.run(_a_worker_that_is_forgotten_leaves_no_child())


_PARENT = """
import asyncio, sys
from server.worker import WorkerProcess

async def main():
    worker = WorkerProcess({module!r})
    await worker.start()
    print(worker.pid, flush=True)
    await worker.call({function!r}, *{args!r}, timeout=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("busy", [True, False])
def test_a_child_dies_with_its_parent_even_if_its_interpreter_is_held(busy: bool) -> None:
    function, args = ("hold_the_interpreter", ()) if busy else ("sleep", (1000,))
    source = _PARENT.format(module=FUNCTIONS, function=function, args=args)
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
    finally:
        parent.kill()
        parent.communicate()
    asyncio.run(until_gone(pid))
