"""POST /v1/chat/completions."""

from __future__ import annotations

import logging
import uuid

from fastapi import APIRouter, Request, Response

from server.chat.completion import begin_chat
from server.chat.schema import CHAT_NOT_SUPPORTED, ChatRequest, parse_chat
from server.comeback import read_retries
from server.openapi import GENERATING, describe
from server.routes.answering import respond
from server.service import Service
from server.shapes import ChatAnswer, ChatChunk

logger = logging.getLogger("truedraft.chat")


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()
    described = describe(
        ChatAnswer,
        body=ChatRequest,
        refused=CHAT_NOT_SUPPORTED,
        chunk=ChatChunk,
        errors=GENERATING,
        facts=service.facts,
    )

    @router.post("/v1/chat/completions", tags=["chat"], **described)
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        settings = service.settings
        parsed = await service.read(request, parse_chat)
        if settings.log_prompts:
            logger.info("messages %r", parsed.messages, extra={"request_id": request.state.request_id})
        state, arrival_time = request.state, request.state.arrival_time
        deadline = service.deadline(parsed.timeout, arrival_time)
        state.answer_id = f"chatcmpl-{uuid.uuid4().hex}"  # for the access log
        retries = read_retries(request.headers)
        beginning = begin_chat(
            service, parsed, state.answer_id, arrival_time, deadline, state.key, state.trace, retries
        )
        return await respond(request, beginning, stream=parsed.stream, send_timeout=settings.send_timeout)

    return router
