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

from server.api_page.page import CONTENT_SECURITY_POLICY, DOCS, load_docs
from server.auth.middleware import ALWAYS_OPEN, AccessMiddleware
from server.comeback import read_retries
from server.connections import ConnectionCapMiddleware
from server.edge import BodyCapMiddleware, EdgeMiddleware, error_response
from server.errors import APIError, retry_headers
from server.loop_lag import watching
from server.metrics.responses import ResponseCounter
from server.openapi import install
from server.page_files import page_paths, page_router
from server.routes.chat import chat_router
from server.routes.completions import completions_router
from server.routes.metrics import metrics_router
from server.routes.models import models_router
from server.routes.status import status_router
from server.routes.tokenize import tokenize_router
from server.service import Service
from server.shapes import ChatChunk, CompletionChunk
from server.ui.routes import ui_router
from server.ui.shell import load_shell, open_paths, shell_router
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
            async with watching(service.metrics.observe_loop_lag):
                yield
        finally:
            await service.engine.shutdown(drain=False)
            await asyncio.to_thread(service.reporter.close)
            await asyncio.to_thread(service.grammars.close)
            await asyncio.to_thread(service.chat.close)
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    app = FastAPI(
        title="Truedraft",
        version=VERSION,
        summary="Speculative decoding whose output is the target model's own, token for token.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own page loads its scripts from another host
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in (completions_router, chat_router, tokenize_router, models_router, status_router, metrics_router):
        app.include_router(router(service))
    docs = load_docs(keys=bool(service.keys))
    pages = page_paths(DOCS, docs)
    app.include_router(page_router(DOCS, docs, CONTENT_SECURITY_POLICY))
    if service.feed is not None:
        files = load_shell(keys=bool(service.keys))
        pages |= open_paths(files)
        app.include_router(shell_router(files))
        app.include_router(ui_router(service, service.feed))
    install(app, chunks=(CompletionChunk, ChatChunk), keys=bool(service.keys))
    app.add_exception_handler(APIError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_other_error)
    capped = BodyCapMiddleware(app, max_body_bytes=service.settings.max_body_bytes)
    count = partial(service.metrics.reject, "connections")
    edge = EdgeMiddleware(ConnectionCapMiddleware(_guarded(capped, service, pages), count), service.tracing)
    return ResponseCounter(edge, service.metrics.count_response)


def _guarded(app: ASGIApp, service: Service, pages: frozenset[str]) -> ASGIApp:
    """``app`` behind the API keys, and these behind CORS: a browser asks for that without a key.

    ``pages``: paths of the pages' files, which hold no data.
    """
    settings = service.settings
    open_to_all = ALWAYS_OPEN | pages
    guarded: ASGIApp = AccessMiddleware(
        app,
        keys=service.keys,
        limiter=service.limiter,
        count=service.metrics.reject,
        open_paths=open_to_all | {"/metrics"} if settings.metrics_without_key else open_to_all,
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
    if error.wait is not None:
        error.headers |= retry_headers(error.wait(read_retries(request.headers)))
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
