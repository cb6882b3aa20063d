"""The HTTP application around a service: routes, errors, the edge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server.auth.middleware import ALWAYS_OPEN, AccessMiddleware
from server.connections import ConnectionCapMiddleware
from server.edge import BodyCapMiddleware, EdgeMiddleware, error_response
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

# Headers that a web page may read.
_EXPOSED = ("Retry-After", "Retry-After-Ms", "X-Request-Id", "X-Seed")
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
    install(app, chunks=(CompletionChunk, ChatChunk), keys=bool(service.keys))
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_other_error)
    capped = BodyCapMiddleware(app, max_body_bytes=service.settings.max_body_bytes)
    count = partial(service.metrics.reject, "connections")
    return EdgeMiddleware(ConnectionCapMiddleware(_guarded(capped, service), count))


def _guarded(app: ASGIApp, service: Service) -> ASGIApp:
    """``app`` behind the API keys, and these behind CORS: a browser asks for that without a key."""
    settings = service.settings
    guarded: ASGIApp = AccessMiddleware(
        app,
        keys=service.keys,
        limiter=service.limiter,
        count=service.metrics.reject,
        open_paths=ALWAYS_OPEN | {"/metrics"} if settings.metrics_without_key else ALWAYS_OPEN,
    )
    if not settings.cors_origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error_response(error)


async def _on_other_error(request: Request, error: Exception) -> Response:
    return error_response(APIError(500, "the server failed"))  # it is logged at the edge


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = _MESSAGES.get(error.status_code, str(error.detail))
    return error_response(APIError(error.status_code, message, headers=error.headers))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(APIError(400, f"{param}: {first['msg']}", param=param))
