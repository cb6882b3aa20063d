"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from server.body import read_json_object
from server.completion import begin_completion
from server.errors import APIError
from server.openapi import POST, describe
from server.schemas import NOT_SUPPORTED, CompletionRequest, parse_completion
from server.service import Service
from server.shapes import CompletionAnswer, CompletionChunk
from server.sse import EventStream, dump_json

logger = logging.getLogger("truedraft.completions")

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the log does


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()
    described = describe(
        CompletionAnswer, body=CompletionRequest, refused=NOT_SUPPORTED, chunk=CompletionChunk, errors=POST
    )

    @router.post("/v1/completions", tags=["completions"], **described)
    async def create_completion(request: Request) -> Response:
        """Complete a prompt, or several."""
        settings = service.settings
        parsed = await read_json_object(
            request, max_bytes=settings.max_body_bytes, deadline=settings.body_timeout, parse=parse_completion
        )
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        completion = await begin_completion(service, parsed, completion_id, request.state.arrival_time)
        if settings.log_prompts:
            logger.info("prompts %r", parsed.prompt, extra={"request_id": request.state.request_id})
        headers = {"X-Seed": str(completion.seed)}
        if parsed.stream:
            return EventStream(
                completion.stream(), on_close=completion.abort, send_timeout=settings.send_timeout, headers=headers
            )
        try:
            answer = await _unless_disconnected(request, completion.whole)
        except APIError as error:  # the seed helps to see the failure again
            error.headers.update(headers)
            raise
        finally:
            completion.abort()
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(dump_json(answer), media_type="application/json", headers=headers)

    return router


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
