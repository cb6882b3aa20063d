"""ASGI middleware that lets in who has a key, and no more of them than their limits allow."""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth.keys import ApiKeys
from server.edge import error_response
from server.errors import APIError
from server.rate import RateLimiter

ALWAYS_OPEN = frozenset({"/live", "/health"})
KEYS_IN_A_REQUEST = 1  # of two, a proxy in front might look at the other
UNAUTHORIZED = "invalid_api_key"  # reason of the refusal, for the metric

_BEARER = re.compile(rb"bearer +([\x21-\x7e]+)", re.IGNORECASE)


class AccessMiddleware:
    """Inside EdgeMiddleware, outside of everything that knows a path.

    With keys, a request needs one unless it reads a path of ``open_paths``, spelt exactly so. Its key's name is
    ``scope["state"]["key"]``, None without keys. POST requests are counted against the key's limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        limiter: RateLimiter,
        count: Callable[[str], None],
        open_paths: frozenset[str] = ALWAYS_OPEN,
    ) -> None:
        self.app = app
        self._keys = keys
        self._limiter = limiter
        self._count = count
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"nothing here serves {scope['type']}")
        try:
            self._admit(scope)
        except APIError as refusal:
            await error_response(refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> None:
        """Raises APIError 401 or 429."""
        state = scope.setdefault("state", {})
        state["key"] = None
        if self._keys:
            name = self._name_of(scope)
            if name is None:
                if self._is_open(scope):
                    return
                self._count(UNAUTHORIZED)
                raise _unauthorized()
            state["key"] = name
        if scope["method"] == "POST":
            self._limiter.take_request(state["key"])

    def _name_of(self, scope: Scope) -> str | None:
        """Whose key the request has; None if it has none, a wrong one or more than one."""
        values = [value for header, value in scope["headers"] if header.lower() == b"authorization"]
        if len(values) != KEYS_IN_A_REQUEST:
            return None
        match = _BEARER.fullmatch(values[0].strip())
        return None if match is None else self._keys.find(match[1])

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        # The path as it was sent, too: what had to be decoded to look like an open one is none.
        as_sent = scope.get("raw_path") or path.encode("utf-8")
        return scope["method"] in ("GET", "HEAD") and path in self._open_paths and as_sent == path.encode("utf-8")


def _unauthorized() -> APIError:
    # One answer for all: what was wrong with a key is nobody's business.
    return APIError(
        401,
        "a valid API key is needed: send the header Authorization: Bearer KEY, once",
        headers={"WWW-Authenticate": 'Bearer realm="truedraft"'},
    )
