"""What goes between a server and an engine in another process, and its form on the wire.

Plain data in MessagePack, checked against these types when it is read: what comes in can be wrong, but it cannot run.
One message is one frame: four bytes of length, most significant first, and the payload.

::

    server                                     engine's process
    Submit, Abort, Call          ->
                                 <-            Batch: what one turn of the loop brought, mostly one step
                                 <-            Answer to a Call
    Shutdown                     ->
                                 <-            Ended, and nothing more
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from scheduler.request import ChoiceEvent, EngineRequest
from scheduler.stats import StepRecord

MAX_FRAME_BYTES = 2**30 - 1
_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


class ProtocolError(ValueError):
    """What came is no message."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Queue a request; room for it has been found. ``number`` counts these messages from 1."""

    number: int
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    request_id: str
    error: str | None


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Ask for one of the named functions of the engine's process."""

    number: int
    name: str
    argument: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    drain: bool
    timeout: float  # seconds
    grace: float


class Status(msgspec.Struct, frozen=True, array_like=True):
    """How the engine stands when this is sent."""

    num_received: int = 0  # the number of the last Submit
    num_waiting: int = 0  # requests of which no choice has run
    waiting_tokens: int = 0  # their prompt tokens
    seconds_since_progress: float = 0.0
    idle: bool = True
    unhealthy_reason: str | None = None


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """Events in their order, then the records of the steps that made them. Empty ones are a heartbeat."""

    events: tuple[ChoiceEvent, ...]
    records: tuple[StepRecord, ...]
    status: Status


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: int
    value: Any
    error: str | None


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The engine has ended. ``in_order``: every request ended by itself, and the model thread is done."""

    in_order: bool


ToEngine = Submit | Abort | Call | Shutdown
FromEngine = Batch | Answer | Ended

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame. Raises ValueError for text that is no valid Unicode, for what is no plain data, or too large."""
    try:
        return frame(_encoder.encode(message))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a message cannot be sent: {error}") from error


def frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(payload)} bytes; at most {MAX_FRAME_BYTES} can be sent")
    return _LENGTH.pack(len(payload)) + payload


def length_of(head: bytes | bytearray, start: int = 0) -> int:
    """Of the payload of a frame that begins at ``start``. Raises ProtocolError for a length that none has."""
    (length,) = _LENGTH.unpack_from(head, start)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes")
    return int(length)


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises ProtocolError."""
    try:
        return _to_engine.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"not a message to an engine: {error}") from error


def decode_from_engine(payload: bytes) -> FromEngine:
    """Raises ProtocolError."""
    try:
        return _from_engine.decode(payload)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"not a message from an engine: {error}") from error


class FrameReader:
    """Cuts a stream of bytes into the payloads of its frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. Raises ProtocolError for a length that none has."""
        self._data += data
        payloads, start = [], 0
        while len(self._data) - start >= LENGTH_BYTES:
            begin = start + LENGTH_BYTES
            end = begin + length_of(self._data, start)
            if len(self._data) < end:
                break
            payloads.append(bytes(self._data[begin:end]))
            start = end
        del self._data[:start]
        return payloads
