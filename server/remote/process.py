"""The engine's process, as the server that started it has it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref

from server.child_environment import without_secrets
from server.worker import die_with

STACKS_SIGNAL = signal.SIGUSR1  # has it write where its threads stand
TERMINATE_SECONDS = 3.0  # below what server.ending gives a server that was told to end while it starts
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from server.remote.process import main; main()"


class ChildProcess:
    """Started with its end of a socket (``sock`` is the other one), and ended with this process in every case.

    It runs ``main(descriptor of the socket)`` of ``module``, see server.remote.child. It lives in a process group of
    its own: a terminal's interrupt is for the server, which tells it when to end.
    """

    def __init__(self, module: str = "server.remote.child") -> None:
        self.sock, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), module, str(theirs.fileno()), str(lifeline)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stderr, which the log goes to, is the server's own
                pass_fds=(theirs.fileno(), lifeline),
                process_group=0,
                env=without_secrets(os.environ),
            )
        except OSError:
            self.sock.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._dropped = weakref.finalize(self, _end, self._process, self._lifeline)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout: float) -> int | None:
        """Its exit code (negative: the signal that ended it), or None if it still runs after so many seconds."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it at once; nothing if it has ended."""
        self._process.kill()

    def end(self) -> None:
        """End it, with some seconds for what it may have started itself, and wait for it."""
        self._process.terminate()
        if self.wait(TERMINATE_SECONDS) is None:
            self.kill()
        self._dropped()
        self.sock.close()

    def dump_stacks(self) -> None:
        """Have it write where its threads stand to stderr. Only when it is ready: before, the signal ends it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(STACKS_SIGNAL)


def main() -> None:
    """What the process runs. Its arguments: a module, the descriptors of a socket and of its lifeline."""
    module, sock, lifeline = sys.argv[1:]
    die_with(int(lifeline))  # before anything that takes long is imported
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a terminal may stop who writes from another group
    importlib.import_module(module).main(int(sock))


def _end(process: subprocess.Popen[bytes], lifeline: int) -> None:
    process.kill()
    process.wait()
    os.close(lifeline)
