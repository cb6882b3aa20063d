"""Large answers as JSON, put together in a thread and in pieces: the encoder lets nobody else run while it works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from server.sse import dump_json, json_text

# An entry of a list may be a token with 20 alternatives; so many take a millisecond or two.
ENTRIES = 64
THREAD_ABOVE_ENTRIES = 256
DEPTH = 5  # down to choices[0].logprobs.top_logprobs[i]: below, things are small


async def dump_answer(answer: Mapping[str, Any]) -> bytes:
    """``dump_json`` of an answer or a chunk, however many tokens it is about, while the event loop goes on."""
    if _entries(answer, 0) <= THREAD_ABOVE_ENTRIES:
        return dump_json(answer)
    return await asyncio.to_thread(lambda: "".join(_pieces(answer, 0)).encode())


async def large_event(chunk: Mapping[str, Any]) -> bytes:
    """``data_event`` of a chunk that may be about a whole prompt."""
    return b"data: " + await dump_answer(chunk) + b"\n\n"


def _entries(value: object, depth: int) -> int:
    """How many entries its lists have, without going into those that are about tokens."""
    if depth >= DEPTH:
        return 0
    if isinstance(value, dict):
        return sum(_entries(inner, depth + 1) for inner in value.values())
    if not isinstance(value, list):
        return 0
    return len(value) + (sum(_entries(inner, depth + 1) for inner in value) if depth < 2 else 0)


def _pieces(value: object, depth: int) -> Iterator[str]:
    """Joined they are ``json_text`` of it."""
    if isinstance(value, dict) and value and depth < DEPTH:
        before = "{"
        for name, inner in value.items():
            yield f"{before}{json_text(name)}:"
            yield from _pieces(inner, depth + 1)
            before = ","
        yield "}"
    elif isinstance(value, list) and value and depth < 2:
        before = "["
        for inner in value:
            yield before
            yield from _pieces(inner, depth + 1)
            before = ","
        yield "]"
    elif isinstance(value, list) and len(value) > ENTRIES:
        before = "["
        for start in range(0, len(value), ENTRIES):
            yield before + json_text(value[start : start + ENTRIES])[1:-1]
            before = ","
        yield "]"
    else:
        yield json_text(value)
