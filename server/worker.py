"""A child process for work on what strangers sent: it can be killed, so that no input can hold the server up.

The child imports one module and calls its functions, one at a time. It starts with the first call (or ``start``), and
again after a call that had to be ended. It ends with the server in every case: the kernel signals it when the last
descriptor of its lifeline is closed, also while its interpreter is busy and could not look at anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as duplex_pipe
from typing import Any, Literal

START_SECONDS = 60.0  # in which the child must have imported its module
MAX_RESULT_BYTES = 64 * 2**20
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from server.worker import main; main(sys.argv[1:])"
)

Answer = tuple[Literal["ready", "result", "refused", "failed"], Any]


class WorkerFailure(Exception):
    """A call without a result. The message is one line."""


class WorkerError(WorkerFailure):
    """The function raised ValueError: the first line of its message."""


class WorkerTimeout(WorkerFailure):
    """The call took longer than its timeout; its child was killed."""


class WorkerCrashed(WorkerFailure):
    """The child died, did not start, was out of memory, raised what is not a ValueError, or is closed."""


class WorkerProcess:
    """Calls functions of ``module`` in a child of its own; ``memory_bytes`` bounds the child's address space.

    Calls run one at a time, in the order in which they were made. A caller that is cancelled leaves the queue; a call
    that runs already goes on to its end or its timeout, unheard. Not bound to an event loop.
    """

    def __init__(self, module: str, *, memory_bytes: int | None = None) -> None:
        self._module = module
        self._memory_bytes = memory_bytes
        self._child: _Child | None = None
        self._lock = threading.Lock()  # around _child and _closed
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"worker-{module}")
        self._dropped = weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    async def start(self) -> None:
        """Start the child before it is needed. Raises WorkerCrashed."""
        await self._submit(self._running_child)

    async def call(self, function_name: str, *args: object, timeout: float) -> Any:  # noqa: ASYNC109 - the child is what is timed
        """What ``module.function_name(*args)`` returns; arguments and result are pickled.

        ``timeout`` is in seconds, from when the call begins to run: neither waiting for earlier calls nor the child's
        start count. Raises WorkerError, WorkerTimeout or WorkerCrashed.
        """
        return await self._submit(self._call, function_name, args, timeout)

    def close(self) -> None:
        """Kill the child; the call that runs and all that wait raise WorkerCrashed. May be called again."""
        with self._lock:
            self._closed = True
            child, self._child = self._child, None
        if child is not None:
            child.end()
            with contextlib.suppress(RuntimeError):  # closed twice at once
                self._pool.submit(child.kill)  # behind the call that may be reading from it
        self._pool.shutdown(wait=False)

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        child = self._child
        return None if child is None else child.process.pid

    async def _submit(self, function: Callable[..., Any], *args: object) -> Any:
        try:
            future = self._pool.submit(function, *args)
        except RuntimeError:
            raise WorkerCrashed("the worker is closed") from None
        return await asyncio.wrap_future(future)

    def _running_child(self) -> _Child:
        with self._lock:
            if self._closed:
                raise WorkerCrashed("the worker is closed")
            if self._child is not None and self._child.ready and self._child.process.poll() is not None:
                self._child.kill()  # it died between two calls, which is nobody's fault
                self._child = None
            if self._child is None:
                self._child = _Child(self._module, self._memory_bytes)
            child = self._child
        if not child.ready:
            try:
                answer = child.receive(START_SECONDS)
            except WorkerFailure as error:
                self._end(child)
                raise WorkerCrashed(f"the worker did not start: {error}") from None
            if answer[0] != "ready":
                self._end(child)
                raise WorkerCrashed(f"the worker did not start: {answer[1]}")
            child.ready = True
        return child

    def _call(self, function_name: str, args: tuple[object, ...], timeout: float) -> Any:
        request = pickle.dumps((function_name, args))
        child = self._running_child()
        try:
            child.send(request)
            kind, value = child.receive(timeout)
        except WorkerFailure:
            self._end(child)
            raise
        if kind == "failed":  # what it left behind in the child is unknown
            self._end(child)
            raise WorkerCrashed(value)
        if kind == "refused":
            raise WorkerError(value)
        return value

    def _end(self, child: _Child) -> None:
        with self._lock:
            if self._child is child:
                self._child = None
        child.kill()


class _Child:
    """The process and its two channels: requests and answers, and the lifeline."""

    def __init__(self, module: str, memory_bytes: int | None) -> None:
        # Imported here: the child imports this module too, and has no use for the settings.
        from server.child_environment import without_secrets

        self.ready = False
        self._connection, theirs = duplex_pipe()
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), module]
        try:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(lifeline), str(memory_bytes or 0)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline),
                process_group=0,  # a terminal's interrupt is for the server
                env=without_secrets(os.environ),
            )
        except OSError as error:
            self._connection.close()
            os.close(self._lifeline)
            raise WorkerCrashed(f"the worker did not start: {error.strerror}") from None
        finally:
            theirs.close()
            os.close(lifeline)
        self._dropped = weakref.finalize(self, _kill, self.process, self._connection, self._lifeline)

    def send(self, request: bytes) -> None:
        try:
            self._connection.send_bytes(request)
        except (OSError, ValueError):
            raise WorkerCrashed("the worker died") from None

    def receive(self, timeout: float) -> Answer:
        deadline = time.monotonic() + timeout
        try:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerTimeout(f"it took longer than {timeout:g} s")
            answer: Answer = pickle.loads(self._connection.recv_bytes(MAX_RESULT_BYTES))
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            raise WorkerCrashed("the worker died") from None
        return answer

    def end(self) -> None:
        """Kill the process and wait for it: it may not linger as a zombie. From any thread."""
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """The same, and close the channels: only where nothing reads from them."""
        self._dropped()


def _kill(process: subprocess.Popen[bytes], connection: Connection, lifeline: int) -> None:
    process.kill()
    process.wait()
    connection.close()
    os.close(lifeline)


def main(arguments: list[str]) -> None:
    """The child: module, descriptor of the requests, descriptor of the lifeline, bytes of memory (0: unbounded)."""
    module, requests, lifeline, memory_bytes = arguments[0], *map(int, arguments[1:])
    die_with(lifeline)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with Connection(requests) as connection, contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            functions = vars(importlib.import_module(module))
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {_first_line(error)}"))
            return
        connection.send(("ready", None))
        while True:
            name, args = pickle.loads(connection.recv_bytes())
            connection.send(_answer(functions, name, args))


def _answer(functions: dict[str, Any], name: str, args: tuple[object, ...]) -> Answer:
    try:
        return "result", functions[name](*args)
    except ValueError as error:
        return "refused", _first_line(error)
    except MemoryError:
        return "failed", "the worker is out of memory"
    except BaseException as error:  # a library's panic is one, too
        return "failed", f"the worker failed with {type(error).__name__}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def die_with(lifeline: int) -> None:
    """Have the kernel end this process when the other end of ``lifeline`` is closed (SIGIO's default is to end it).

    A thread that waits for it would wait for the interpreter as well, which a library may hold for minutes.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before
        os._exit(1)
