"""One generated answer over HTTP, whole or streamed, for every endpoint that generates text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from server.completion import Completion
from server.errors import APIError
from server.large_json import dump_answer
from server.sse import EventStream

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the log does


async def respond(request: Request, completion: Completion, *, stream: bool, send_timeout: float) -> Response:
    """The answer. The engine's part ends with it, also if the client leaves. Raises APIError if a choice fails."""
    headers = {"X-Seed": str(completion.seed)}
    if stream:
        return EventStream(completion.stream(), on_close=completion.abort, send_timeout=send_timeout, headers=headers)
    try:
        answer = await _unless_disconnected(request, completion.whole)
    except APIError as error:  # the seed helps to see the failure again
        error.headers.update(headers)
        raise
    finally:
        completion.abort()
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(await dump_answer(answer), media_type="application/json", headers=headers)


async def _unless_disconnected(
    request: Request, work: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any] | None:
    """The result of ``work``; None, and ``work`` cancelled, if the client leaves before."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
