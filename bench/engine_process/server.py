"""``truedraft serve`` with a stop watch on its event loop: ``python -m bench.engine_process.server serve ...``.

``POST /lag`` begins to watch, ``GET /lag`` says what was seen since then, as bench.event_loop.probe.Lag.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from bench.event_loop.probe import LoopProbe
from server.cli import main, serve
from server.settings import Settings

PATH = "/lag"


class LagEndpoint:
    """In front of an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._probe = LoopProbe()
        self._watching = contextlib.AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        await self._watching.aclose()
        said: dict[str, Any] = asdict(self._probe.lag)
        if scope["method"] == "POST":
            self._watching = contextlib.AsyncExitStack()
            await self._watching.enter_async_context(self._probe.watching())
            said = {}
        await Response(json.dumps(said), media_type="application/json")(scope, receive, send)


def serve_watched(settings: Settings) -> int:
    # Imported here: torch takes seconds, and --help or a bad flag should not.
    from server.app import create_app

    return serve(settings, build_app=lambda service: LagEndpoint(create_app(service)))


if __name__ == "__main__":
    raise SystemExit(main(serve_settings=serve_watched))
