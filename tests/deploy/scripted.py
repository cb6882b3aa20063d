"""A server that answers as written down: what each connection sends, and when it is closed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

CLOSE = b"(close)"  # instead of a piece or an answer: the server closes the connection
FOR_EVER = b"(for ever)"  # instead of a piece: it sends nothing more, until the client leaves

Answer = Sequence[bytes] | bytes  # pieces, each sent by itself; or CLOSE


def stream_answer(*events: bytes) -> list[bytes]:
    """A 200 of server-sent events, one chunk of HTTP for each; CLOSE and FOR_EVER stay what they are."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = [e if e in (CLOSE, FOR_EVER) else f"{len(e):x}\r\n".encode() + e + b"\r\n" for e in events]
    return [head, *pieces, b"0\r\n\r\n"]


def plain_answer(status: int, body: bytes, *headers: tuple[str, str]) -> list[bytes]:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers)]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", body]


class Scripted:
    """Takes one connection after the other; each answers one request after the other, as its list says."""

    def __init__(self, connections: Sequence[Sequence[Answer]]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections = connections
        self._left = threading.Event()
        self.num_connections = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="scripted", daemon=True)
        self._thread.start()

    def saw_the_client_leave(self, seconds: float) -> bool:
        return self._left.wait(seconds)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)

    def _serve(self) -> None:
        for answers in self._connections:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                for answer in answers:
                    if answer == CLOSE or not self._read_request(connection) or not self._send(connection, answer):
                        break

    def _send(self, connection: socket.socket, answer: Answer) -> bool:
        """Whether the connection goes on."""
        for piece in answer:
            assert isinstance(piece, bytes)
            if piece == CLOSE:
                return False
            if piece == FOR_EVER:
                if not connection.recv(1):
                    self._left.set()
                return False
            connection.sendall(piece)
        return True

    @staticmethod
    def _read_request(connection: socket.socket) -> bool:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return False
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        fields = [line.partition(b":") for line in head.lower().split(b"\r\n")]
        length = sum(int(value) for name, _, value in fields if name == b"content-length")
        while len(body) < length:
            body += connection.recv(65536)
        return True


@contextlib.contextmanager
def scripted(*connections: Sequence[Answer]) -> Iterator[Scripted]:
    server = Scripted(connections)
    try:
        yield server
    finally:
        server.close()
