"""POST /tokenize and /detokenize: what a text is to the model, without running it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from server.large_json import dump_answer
from server.openapi import GENERATING, describe
from server.service import Service
from server.shapes import TextAnswer, TokensAnswer
from server.tokenizing import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    detokenize,
    parse_detokenize,
    parse_tokenize,
    tokenize,
    tokenize_chat,
)


def tokenize_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["tokens"])

    @router.post(
        "/tokenize",
        **describe(TokensAnswer, body=(TokenizeRequest, TokenizeChatRequest), errors=GENERATING, facts=service.facts),
    )
    async def create_tokens(request: Request) -> Response:
        """The ids of a text or of a chat."""
        parsed = await service.read(request, parse_tokenize)
        with service.counting_text():
            async with service.deadline(None, request.state.arrival_time).bound():
                return await _json(await _tokens(parsed, service))

    @router.post("/detokenize", **describe(TextAnswer, body=DetokenizeRequest, errors=GENERATING, facts=service.facts))
    async def create_text(request: Request) -> Response:
        """The text of ids."""
        parsed = await service.read(request, parse_detokenize)
        with service.counting_text():
            async with service.deadline(None, request.state.arrival_time).bound():
                return await _json(await detokenize(parsed, service.tokenizer, service.facts))

    return router


async def _tokens(parsed: TokenizeRequest | TokenizeChatRequest, service: Service) -> dict[str, Any]:
    if isinstance(parsed, TokenizeChatRequest):
        return await tokenize_chat(parsed, service)
    return await tokenize(parsed, service.tokenizer, service.facts)


async def _json(answer: dict[str, Any]) -> Response:
    return Response(await dump_answer(answer), media_type="application/json")
