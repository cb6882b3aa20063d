"""Clients of good and bad manners, against a server that says what it saw."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from bench.soak.wire import Manner, Reply, exchange

BODY = b"x" * 1000
HEAD = b"HTTP/1.1 200 OK\r\nX-Name: value\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"c8\r\n" + b"y" * 200 + b"\r\n"
END = b"0\r\n\r\n"
MUCH = 1_000_000  # bytes: more than any buffer between the two takes


@dataclass
class Seen:
    """What the server saw of one client."""

    received: bytes = b""
    closed: bool = False
    sent_all: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)


Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def whole(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + 5 * CHUNK + END)
    await writer.drain()


async def cut(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + CHUNK)
    await writer.drain()
    writer.close()


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    while True:
        writer.write(CHUNK)
        await writer.drain()
        await asyncio.sleep(0)


async def much(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    for _ in range(MUCH // 200):
        writer.write(CHUNK)
    await writer.drain()
    writer.write(END)


async def meet(
    answering: Answering, manner: Manner, patience: float = 60.0, go_on: asyncio.Event | None = None
) -> tuple[Reply, Seen]:
    """The reply, and what the server saw until the client was gone."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sending: asyncio.Task[None] | None = None
        try:
            while piece := await reader.read(65536):
                seen.received += piece
                if sending is None and seen.received.endswith(BODY):
                    sending = asyncio.create_task(_send(writer))
        except ConnectionError:
            pass
        seen.closed = True
        if sending is not None:
            sending.cancel()
        writer.close()
        seen.done.set()

    async def _send(writer: asyncio.StreamWriter) -> None:
        await answering(writer)
        seen.sent_all = True

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        reply = await exchange(address, "POST", "/p", BODY, {"x-a": "b"}, manner, patience=patience, go_on=go_on)
        await seen.done.wait()
    return reply, seen


def test_a_patient_client_sends_all_and_reads_all() -> None:
    reply, seen = asyncio.run(meet(whole, Manner()))
    assert (reply.end, reply.status, reply.body, reply.headers["x-name"]) == ("whole", 200, b"y" * 1000, "value")
    assert seen.received.startswith(b"POST /p HTTP/1.1\r\n")
    assert b"x-a: b\r\n" in seen.received


def test_a_slow_sender_and_a_slow_reader_get_all_the_same() -> None:
    for manner in (Manner(send_pause=0.01), Manner(read_pause=0.001)):
        reply, _ = asyncio.run(meet(whole, manner))
        assert (reply.end, len(reply.body)) == ("whole", 1000)


@pytest.mark.parametrize(
    "manner",
    [
        Manner(leaves_after_seconds=0.0),
        Manner(leaves_after_seconds=0.05, resets=True),
        Manner(leaves_after_bytes=300),
        Manner(leaves_after_bytes=300, resets=True),
    ],
)
def test_a_client_that_leaves_is_gone_and_says_so(manner: Manner) -> None:
    reply, seen = asyncio.run(meet(endless, manner))
    assert reply.end == "left"
    assert seen.closed


def test_a_client_that_leaves_in_the_body_has_sent_a_part_of_it() -> None:
    reply, seen = asyncio.run(meet(whole, Manner(body_share=0.5, leaves_after_seconds=0.0)))
    assert reply.end == "left"
    assert seen.received.count(b"x") < len(BODY)


def test_a_server_that_closes_early_is_told_from_one_that_says_nothing() -> None:
    assert asyncio.run(meet(cut, Manner()))[0].end == "cut"
    assert asyncio.run(meet(silent, Manner(), patience=0.2))[0].end == "hung"


def test_nobody_there_is_a_cut() -> None:
    reply = asyncio.run(exchange(("127.0.0.1", 1), "GET", "/", patience=10.0))
    assert (reply.end, reply.status) == ("cut", None)


def test_a_stuck_client_reads_nothing_until_it_is_told() -> None:
    async def run() -> tuple[Reply, Seen, bool]:
        go_on = asyncio.Event()
        early = False

        async def answering(writer: asyncio.StreamWriter) -> None:
            nonlocal early
            sending = asyncio.create_task(much(writer))
            for _ in range(20):
                await asyncio.sleep(0.01)
            early = sending.done()
            go_on.set()
            await sending

        reply, seen = await meet(answering, Manner(stuck=True), go_on=go_on)
        return reply, seen, early

    reply, seen, early = asyncio.run(run())
    assert not early
    assert (reply.end, len(reply.body)) == ("whole", MUCH // 200 * 200)
    assert seen.sent_all
