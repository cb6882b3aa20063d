"""POST /v1/completions."""

from __future__ import annotations

import logging
import uuid

from fastapi import APIRouter, Request, Response

from server.comeback import read_retries
from server.completion import begin_completion
from server.openapi import GENERATING, describe
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
        errors=GENERATING,
        facts=service.facts,
    )

    @router.post("/v1/completions", tags=["completions"], **described)
    async def create_completion(request: Request) -> Response:
        """Complete a prompt, or several."""
        settings = service.settings
        parsed = await service.read(request, parse_completion)
        if settings.log_prompts:
            logger.info("prompts %r", parsed.prompt, extra={"request_id": request.state.request_id})
        state, arrival_time = request.state, request.state.arrival_time
        deadline = service.deadline(parsed.timeout, arrival_time)
        state.answer_id = f"cmpl-{uuid.uuid4().hex}"  # for the access log
        retries = read_retries(request.headers)
        beginning = begin_completion(
            service, parsed, state.answer_id, arrival_time, deadline, state.key, state.trace, retries
        )
        return await respond(request, beginning, stream=parsed.stream, send_timeout=settings.send_timeout)

    return router
