"""One HTTP exchange on a connection of its own, by a client of good or bad manners."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import h11

READ_BYTES = 4096  # of a slow reader's read
# Of one who does not read at all: with the loopback's segments of 64 KiB the kernel would keep megabytes of an answer.
_STUCK_BUFFER, _STUCK_SEGMENT = 2048, 536
_SLOW_BUFFER = 16_384
_BUFFER = 2**20

End = Literal["whole", "left", "cut", "hung"]


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves. The default sends all it has to, and reads the answer as it comes."""

    name: str = "patient"
    body_share: float = 1.0  # of the body's bytes that are ever sent
    send_pause: float = 0.0  # seconds between the parts of the body
    leaves_after_seconds: float | None = None  # from when its part of the body is sent
    leaves_after_bytes: int | None = None  # of the answer's body
    read_pause: float = 0.0  # seconds between two reads of READ_BYTES
    stuck: bool = False  # reads nothing until it is told to
    resets: bool = False  # leaves without a goodbye


@dataclass(slots=True)
class Reply:
    """What came. ``end``: all of it, or the client left, or the server closed early, or nothing more came in time."""

    end: End = "hung"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)  # lower-case names
    body: bytes = b""


async def exchange(
    address: tuple[str, int],
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    manner: Manner | None = None,
    *,
    patience: float,
    go_on: asyncio.Event | None = None,
) -> Reply:
    """One request and its answer. ``patience``: seconds for all of it; a stuck client begins to read at ``go_on``.

    Raises nothing but what a bug here would: what the network does is told by the reply.
    """
    manner = manner or Manner()
    reply = Reply()
    try:
        async with asyncio.timeout(patience), _connection(address, manner) as (reader, writer):
            parser = h11.Connection(h11.CLIENT)
            head = h11.Request(
                method=method,
                target=path,
                headers=[
                    ("host", f"{address[0]}:{address[1]}"),
                    ("connection", "close"),
                    ("content-length", str(len(body))),
                    *(headers or {}).items(),
                ],
            )
            writer.write(parser.send(head) or b"")
            await _send(writer, body, manner)
            if manner.stuck and go_on is not None:
                await go_on.wait()
                # Else what is left would come in very small pieces.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            async with _leaving(manner.leaves_after_seconds, reply):
                await _read(reader, parser, reply, manner)
    except TimeoutError:
        reply.end = "hung"
    except (OSError, h11.RemoteProtocolError, asyncio.IncompleteReadError):
        reply.end = "cut"
    return reply


@contextlib.asynccontextmanager
async def _connection(
    address: tuple[str, int], manner: Manner
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = socket.socket()
    sock.setblocking(False)
    slow = manner.stuck or manner.read_pause > 0
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STUCK_BUFFER if manner.stuck else _SLOW_BUFFER)
    if manner.stuck:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _STUCK_SEGMENT)
    if manner.resets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES if slow else 2**16)
    except BaseException:
        sock.close()
        raise
    try:
        yield reader, writer
    finally:
        # At once: to wait for what is not sent yet would be a wait for a server that may not read.
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, body: bytes, manner: Manner) -> None:
    part = body[: int(len(body) * manner.body_share)]
    if not manner.send_pause:
        writer.write(part)
        await writer.drain()
        return
    half = len(part) // 2
    for piece in (part[:half], part[half:]):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(manner.send_pause)


@contextlib.asynccontextmanager
async def _leaving(seconds: float | None, reply: Reply) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds) as leaving:
            yield
    except TimeoutError:
        if not leaving.expired():
            raise
        reply.end = "left"


async def _read(reader: asyncio.StreamReader, parser: h11.Connection, reply: Reply, manner: Manner) -> None:
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                if manner.read_pause:
                    await asyncio.sleep(manner.read_pause)
                parser.receive_data(await reader.read(READ_BYTES if manner.read_pause else 2**16))
            elif isinstance(event, h11.Response):
                reply.status = event.status_code
                reply.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
                size += len(event.data)
                if manner.leaves_after_bytes is not None and size >= manner.leaves_after_bytes:
                    reply.end = "left"
                    return
            elif isinstance(event, h11.EndOfMessage):
                reply.end = "whole"
                return
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                reply.end = "cut"
                return
    finally:
        reply.body = b"".join(pieces)
