"""Errors as OpenAI's clients know them: ``{"error": {message, type, param, code}}``, all four keys always."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from server.comeback import Retries

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class APIError(Exception):
    """An answer that is an error. ``message`` is for the client: no path, no address, no traceback."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
        wait: Callable[[Retries], float] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.kind = kind or (SERVER_ERROR if status >= 500 else INVALID_REQUEST)
        self.code = code or _CODES.get(status, "server_error" if status >= 500 else "invalid_request")
        self.headers = dict(headers or {})
        self.reason = reason  # of a refusal that is not counted yet: see Service.counting_refusals
        self.wait = wait  # seconds until the client should be back, from what it says of its retries

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


_CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    500: "server_error",
    503: "overloaded",
    504: "timeout",
}


def bad_request(message: str, param: str | None, code: str | None = None) -> APIError:
    return APIError(400, message, param=param, code=code)


def unavailable(
    code: str,
    message: str,
    retry_after: float = 1,
    *,
    reason: str | None = None,
    wait: Callable[[Retries], float] | None = None,
) -> APIError:
    """503 with Retry-After; ``code`` is overloaded, model_loading, shutting_down or engine_failed.

    ``wait`` in place of ``retry_after``: it depends on who is told.
    """
    headers = retry_headers(retry_after) if wait is None else None
    return APIError(503, message, code=code, headers=headers, reason=reason, wait=wait)


def retry_headers(seconds: float) -> dict[str, str]:
    """When to come back: in whole seconds as HTTP has it, and in milliseconds.

    OpenAI's clients prefer these, so they come back one by one and not all with the second.
    """
    milliseconds = max(1, math.ceil(1000 * seconds))
    return {"Retry-After": str(math.ceil(milliseconds / 1000)), "Retry-After-Ms": str(milliseconds)}


def shorten(value: object, limit: int = 64) -> str:
    """A JSON value as it may stand in a message: bounded, whatever the client sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= limit else value[:limit] + "…")
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    return text or repr(value)[:limit]
