"""POST /v1/completions."""

from __future__ import annotations

import logging
import uuid

from fastapi import APIRouter, Request, Response

from server.body import read_json_object
from server.completion import begin_completion
from server.openapi import POST, describe
from server.routes.answering import respond
from server.schemas import NOT_SUPPORTED, CompletionRequest, parse_completion
from server.service import Service
from server.shapes import CompletionAnswer, CompletionChunk

logger = logging.getLogger("truedraft.completions")


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()
    described = describe(
        CompletionAnswer,
        body=CompletionRequest,
        refused=NOT_SUPPORTED,
        chunk=CompletionChunk,
        errors=POST,
        facts=service.facts,
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
        return await respond(request, completion, stream=parsed.stream, send_timeout=settings.send_timeout)

    return router
