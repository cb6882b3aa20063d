"""The live feed of one reader: what it has not got yet, put together a few times a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable

from server.ui.blocks import BlockWatch
from server.ui.feed import Feed

TICK_SECONDS = 0.1
SILENCE_SECONDS = 15.0  # after which a comment says that the server is still there

_STILL_THERE = b": \n\n"


async def feed_events(
    feed: Feed,
    blocks: BlockWatch,
    over: Callable[[], bool],
    after: int | None,
    *,
    tick: float = TICK_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[bytes]:
    """Server-sent events from behind step ``after`` on (None: from now on) until it is ``over``.

    It looks at the feed every ``tick`` seconds and is woken by nothing, so watching costs a step nothing.
    """
    known = after is not None and after <= feed.seq
    seq = after if known and after is not None else feed.seq
    num_finished = feed.num_finished_by(seq)
    num_maps = -1
    sent = clock()
    first = True
    while True:
        ending = over()  # asked first: what came before is sent all the same
        blocks.look()
        parts = []
        if feed.seq != seq or first:
            parts.append(_steps_event(feed, seq))
            seq = feed.seq
        if feed.num_finished != num_finished:
            parts.append(_event(b"requests", b'{"requests":[' + b",".join(feed.finished(num_finished)) + b"]}"))
            num_finished = feed.num_finished
        if blocks.number != num_maps and blocks.fresh:
            parts.append(_event(b"blocks", blocks.json))
            num_maps = blocks.number
        first = False
        now = clock()
        if parts:
            yield b"".join(parts)
            sent = now
        elif now - sent >= SILENCE_SECONDS:
            yield _STILL_THERE
            sent = now
        if ending:
            return
        await asyncio.sleep(tick)


def _steps_event(feed: Feed, after: int) -> bytes:
    steps: Iterable[bytes] = (step.json(feed.started) for step in feed.steps(after))
    head = b'{"seq":%d,"dropped":%d,"steps":[' % (feed.seq, feed.num_dropped(after))
    return _event(b"steps", head + b",".join(steps) + b"]}")


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"
