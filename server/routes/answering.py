"""One generated answer over HTTP, whole or streamed, for every endpoint that generates text."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

from server.completion import Completion
from server.errors import APIError
from server.large_json import dump_answer
from server.sse import EventStream

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the log does

T = TypeVar("T")


async def respond(
    request: Request, beginning: Coroutine[Any, Any, Completion], *, stream: bool, send_timeout: float
) -> Response:
    """The answer that ``beginning`` begins. All of it ends with the response, also if the client leaves before.

    Raises APIError if it cannot begin or a choice fails.
    """
    completion = await _unless_disconnected(request, beginning)
    if completion is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    headers = {"X-Seed": str(completion.seed)}

    def close() -> None:
        completion.abort()
        request.state.completion_tokens = completion.num_tokens  # for the access log

    if stream:
        return EventStream(completion.stream(), on_close=close, send_timeout=send_timeout, headers=headers)
    try:
        answer = await _unless_disconnected(request, completion.whole())
    except APIError as error:  # the seed helps to see the failure again
        error.headers.update(headers)
        raise
    finally:
        close()
    if answer is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(await dump_answer(answer), media_type="application/json", headers=headers)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None, and ``work`` cancelled, if the client leaves before."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
