"""Child processes that never outlive what started them: an exception, a signal or the end of this process ends them,
also one that leaves it no time to do anything (see ``_tie``).

A signal's handler runs in the main thread only, between two bytecodes. A main thread that waits in a system call may
so miss a signal that came just before the call, and one that is inside ``Popen`` would lose the child that was just
made. Therefore children are made and waited for in other threads, and the caller waits for those in short slices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import IO, TypeVar

T = TypeVar("T")

_SLICE_SECONDS = 0.1
_TERMINATE_SECONDS = 2.0  # from SIGTERM, in which a child may remove its temporary files, to SIGKILL

_open: set[Children] = set()
_open_lock = threading.RLock()


class ChildrenEnded(RuntimeError):
    """No child is started any more: ``end`` was called."""


def end_all_children() -> None:
    """End the children of every open :class:`Children`: for a process that is about to leave without unwinding."""
    with _open_lock:
        for children in list(_open):
            children.end()


class Children:
    """Runs commands, from several threads, and ends those that run when its block is left, however it is left."""

    def __init__(self) -> None:
        # A signal's handler may call end() while its thread is inside end().
        self._lock = threading.RLock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def __enter__(self) -> Children:
        with _open_lock:
            _open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        finally:
            with _open_lock:
                _open.discard(self)

    def run_all(self, jobs: Iterable[Callable[[], T]], *, at_once: int = 1) -> list[T]:
        """The results of ``jobs``, each called in a thread (where it may call :meth:`run`), in their order.

        The first exception, of a job or in this thread, ends all children and is raised.
        """
        with ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="children") as pool:
            try:
                waiting: set[Future[T]] = set()
                futures = [pool.submit(job) for job in jobs]
                waiting.update(futures)
                while waiting:
                    done, waiting = wait(waiting, timeout=_SLICE_SECONDS, return_when=FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                return [future.result() for future in futures]
            except BaseException:  # nobody waits for the others, which may take half a minute
                self.end()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        stdout: int | IO[str] | None = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run one command without input to its end; its stderr is in the result. Not for the main thread.

        Raises ChildrenEnded, OSError, or subprocess.TimeoutExpired after ``timeout`` seconds (the child is ended then).
        """
        lifeline, ours = os.pipe()
        try:
            with self._lock:
                if self._ended:
                    raise ChildrenEnded(f"{command[0]} was not started")
                # A group of its own: a compiler's driver, for one, leaves its children running when it is ended alone.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=subprocess.PIPE,
                    env=env,
                    text=True,
                    errors="replace",
                    process_group=0,
                    pass_fds=(lifeline,),
                )
                _tie(process, lifeline)
                self._running.add(process)
            with process:
                try:
                    _, errors = process.communicate(timeout=timeout)
                finally:
                    with self._lock:
                        self._running.discard(process)
                        if process.returncode is None:
                            _end_groups([process])
        finally:
            os.close(lifeline)
            os.close(ours)
        return subprocess.CompletedProcess(command, process.returncode, None, errors)

    def end(self) -> None:
        """End what runs; nothing runs afterwards."""
        with self._lock:
            self._ended = True
            _end_groups(self._running)


def _tie(process: subprocess.Popen[str], lifeline: int) -> None:
    """Have the kernel end the process and all that it started when the other end of ``lifeline`` is closed, as it is
    when this process ends: SIGIO, which ends whoever does not know it, goes to its group. It must have inherited it.
    """
    with contextlib.suppress(ProcessLookupError):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -process.pid)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def _end_groups(processes: Iterable[subprocess.Popen[str]]) -> None:
    """End processes that nobody has reaped, with all that they started."""
    processes = list(processes)
    _signal_groups(processes, signal.SIGTERM)
    deadline = time.monotonic() + _TERMINATE_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    _signal_groups(processes, signal.SIGKILL)  # what ignored the first, and orphans of what heeded it
    for process in processes:
        process.wait()


def _signal_groups(processes: Iterable[subprocess.Popen[str]], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
