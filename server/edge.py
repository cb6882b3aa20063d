"""ASGI middleware at the edge: request ids, the last resort for errors, access log; the body cap by Content-Length."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.body import too_large
from server.errors import APIError, bad_request
from server.log_queue import REQUEST_IDS
from server.tracing.parent import read_parent
from server.tracing.tracing import Tracing

_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]")
MAX_REQUEST_ID = 128
_BODY_REFUSED = (413, 503)
MAX_DISCARDED_BYTES = 64 * 1024**2  # of a body that is too large
DISCARD_SECONDS = 5.0
_POLLED = ("/health", "/live", "/metrics", "/ui/state")  # by machines, every few seconds
_LOGGED = ("answer_id", "key", "completion_tokens")  # what inner layers say of a request, also if its client left

logger = logging.getLogger("truedraft.access")  # one line a request
_edge_logger = logging.getLogger("truedraft.edge")


def clean_request_id(value: str | None) -> str:
    """The client's id without what could break a log line or a header; a new one if nothing is left."""
    cleaned = _UNSAFE.sub("", value or "")[:MAX_REQUEST_ID]
    return cleaned or uuid.uuid4().hex


class EdgeMiddleware:
    """Outermost: everything that answers carries ``X-Request-Id``, errors of the inner layers included.

    Every log line that is written for a request has its ids. Its trace, if it has one, is ``scope["state"]["trace"]``.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing | None = None) -> None:
        self.app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = clean_request_id(headers.get(b"x-request-id", b"").decode("latin-1"))
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["arrival_time"] = started = time.monotonic()
        parent = read_parent(scope["headers"]) if b"traceparent" in headers else None
        trace = None
        if self._tracing is not None:
            trace = self._tracing.begin(scope["method"], scope["path"], request_id, started, parent)
        scope["state"]["trace"] = trace
        ids = {"request_id": request_id}
        if (known := trace or parent) is not None:
            ids["trace_id"] = known.trace_id
        before = REQUEST_IDS.set(ids)
        status = 0
        complete = body_ended = False

        async def receive_body() -> Message:
            nonlocal body_ended
            message = await receive()
            body_ended = message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status, complete
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                status = message["status"]
                # Of a body that is refused the rest may be on its way; but who expects a 100 has sent nothing yet.
                refused = status in _BODY_REFUSED and (b"connection", b"close") in message["headers"]
                if refused and not body_ended and b"expect" not in headers:
                    await _discard(receive)
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode("ascii"))]}
            await send(message)

        try:
            await self.app(scope, receive_body, send_with_id)
        except asyncio.CancelledError:
            if not status:
                raise
            # When the server ends, uvicorn cancels who has still not read its answer, and would call it a failure of
            # ours, with a traceback. It closes the connection all the same.
            _edge_logger.info("the server ended before the client had read its answer", extra=ids)
        except Exception:
            _edge_logger.exception("a request failed", extra=ids)
            if complete:
                return  # a 500, by whom the exception passed
            if status:
                raise  # the answer has begun: only closing the connection can still tell the client
            await error_response(APIError(500, "the server failed"))(scope, receive, send_with_id)
        finally:
            logger.log(
                logging.DEBUG if scope["path"] in _POLLED else logging.INFO,
                "%s %s %d",
                scope["method"],
                scope["path"][:256].encode("unicode_escape").decode("ascii"),
                status,
                extra={
                    **ids,
                    "status": status,
                    "seconds": round(time.monotonic() - started, 6),
                    **{name: scope["state"][name] for name in _LOGGED if scope["state"].get(name) is not None},
                },
            )
            if trace is not None and self._tracing is not None:
                trace.answer_id = scope["state"].get("answer_id")
                self._tracing.ended(trace, status=status, complete=complete, key=scope["state"].get("key"))
            REQUEST_IDS.reset(before)


class BodyCapMiddleware:
    """Refuses a body by its Content-Length, before anything of it is read. Inside of whatever asks who sends it."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(dict(scope.get("headers", ())).get(b"content-length"))
        await (self.app if refusal is None else error_response(refusal))(scope, receive, send)

    def _refusal(self, content_length: bytes | None) -> APIError | None:
        if content_length is None:
            return None
        if not content_length.isdigit():
            return bad_request("the Content-Length header is not a number", None)
        return too_large(self.max_body_bytes) if int(content_length[:20]) > self.max_body_bytes else None


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, within bounds: a client that sends all before it reads would see a reset connection."""
    left = MAX_DISCARDED_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def error_response(error: APIError) -> JSONResponse:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)
