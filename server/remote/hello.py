"""What an engine's process and its server say until the engine is ready, in scheduler.remote's frames."""

from __future__ import annotations

import select
import socket
from typing import Any

import msgspec

from scheduler.remote.messages import LENGTH_BYTES, ProtocolError, frame, length_of
from server.description import EngineDescription

_SLICE_SECONDS = 0.1  # a signal that comes just before a wait is handled when the wait is over


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The server's only word: its settings, as JSON has them."""

    settings: dict[str, Any]


class Line(msgspec.Struct, frozen=True, tag="line"):
    """For whoever started the server."""

    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The engine cannot be had, for a reason that somebody can mend: one line."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine waits for requests. What follows are scheduler.remote's messages."""

    description: EngineDescription
    folder: str  # of the model
    told: dict[str, Any]  # see server.remote.child.tell


Hello = Begin | Line | Refused | Ready

_decoder: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)


class HungUp(Exception):
    """The other side has closed the connection."""


def say(sock: socket.socket, message: Hello) -> None:
    """Raises OSError if nobody listens any more."""
    sock.sendall(frame(msgspec.msgpack.encode(message)))


class Listener:
    """Takes one message after the other from a blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def next(self) -> Hello:
        """Waits for it, and takes no byte behind it. Raises HungUp or ProtocolError."""
        payload = self._exactly(length_of(self._exactly(LENGTH_BYTES)))
        try:
            return _decoder.decode(payload)
        except (msgspec.DecodeError, ValueError) as error:
            raise ProtocolError(f"not a message of a start: {error}") from error

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            if not select.select([self._sock], [], [], _SLICE_SECONDS)[0]:
                continue
            try:
                piece = self._sock.recv(num_bytes - len(data))
            except ConnectionError:
                piece = b""
            if not piece:
                raise HungUp
            data += piece
        return data
