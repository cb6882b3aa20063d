"""ASGI middleware that counts answers by their status."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOT_COUNTED = ("/health", "/live", "/metrics", "/ui")  # asked for by machines, every few seconds


class ResponseCounter:
    """Outermost, so that every answer is seen, whoever gives it. ``count`` gets its status; 0 if there was none."""

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        self.app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_polled(scope["path"]):
            await self.app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, counted)
        finally:
            self._count(status)


def _is_polled(path: str) -> bool:
    return any(path == polled or path.startswith(f"{polled}/") for polled in NOT_COUNTED)
