"""The HTTP application around a service: routes, errors, the edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from server.edge import EdgeMiddleware, error_response
from server.errors import APIError
from server.openapi import install
from server.routes.chat import chat_router
from server.routes.completions import completions_router
from server.routes.metrics import metrics_router
from server.routes.models import models_router
from server.routes.status import status_router
from server.routes.tokenize import tokenize_router
from server.service import Service
from server.shapes import ChatChunk, CompletionChunk
from server.version import VERSION

_MESSAGES = {404: "there is no such path", 405: "this path does not take this method"}


def create_app(service: Service) -> ASGIApp:
    """Starts the engine with its lifespan, and ends it there (without draining: the runner drains before)."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            yield
        finally:
            await service.engine.shutdown(drain=False)
            await asyncio.to_thread(service.reporter.close)
            await asyncio.to_thread(service.grammars.close)
            await asyncio.to_thread(service.chat.close)

    app = FastAPI(
        title="Truedraft",
        version=VERSION,
        summary="Speculative decoding whose output is the target model's own, token for token.",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in (completions_router, chat_router, tokenize_router, models_router, status_router, metrics_router):
        app.include_router(router(service))
    install(app, chunks=(CompletionChunk, ChatChunk))
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    return EdgeMiddleware(app, max_body_bytes=service.settings.max_body_bytes)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = _MESSAGES.get(error.status_code, str(error.detail))
    return error_response(APIError(error.status_code, message, headers=error.headers))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(APIError(400, f"{param}: {first['msg']}", param=param))
