"""Programs that stand for an engine's process (server.remote.process.ChildProcess), without a model."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

NAME = __name__


def main(descriptor: int) -> None:
    """Says that it is there, also to stderr, then what it is asked for: its environment, or nothing for as long as it
    lives.
    """
    print("an engine's process", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: None)
    with socket.socket(fileno=descriptor) as sock:
        sock.sendall(b"!")
        if sock.recv(1) == b"e":
            sock.sendall("\n".join(os.environ).encode() + b"\0")
        while True:
            time.sleep(60)


if __name__ == "__main__":
    # A server that has started one, or a module that it is told, to be killed: tells its pid.
    from server.remote.process import ChildProcess

    child = ChildProcess(*sys.argv[1:] or ["tests.server.engine_children"])
    if not sys.argv[1:]:
        assert child.sock.recv(1) == b"!"
    print(child.pid, flush=True)
    sys.stdin.read()
