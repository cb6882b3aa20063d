"""GET /ui/state and /ui/feed: what the page and ``truedraft top`` show."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from server.connections import WATCHING
from server.errors import unavailable
from server.service import Service
from server.sse import EventStream
from server.ui.blocks import BlockWatch
from server.ui.feed import Feed
from server.ui.forms import encode
from server.ui.state import state
from server.ui.stream import feed_events

MAX_FEEDS = 8  # open at one time
_NO_STORE = {"Cache-Control": "no-store"}


def ui_router(service: Service, feed: Feed) -> APIRouter:
    """Not in the API's description: their form is the page's own, and a feed has no end."""
    router = APIRouter(include_in_schema=False)
    blocks = BlockWatch(service.engine, feed)
    num_open = 0

    def over() -> bool:
        return not service.engine.healthy or (service.draining and not feed.running and not feed.waiting)

    @router.get("/ui/state")
    async def ui_state() -> Response:
        await service.engine.refresh()
        return Response(encode(state(service, feed)), media_type="application/json", headers=_NO_STORE)

    @router.get("/ui/feed")
    async def ui_feed(request: Request, after: Annotated[int | None, Query(ge=0, le=2**53)] = None) -> Response:
        nonlocal num_open
        service.check_open()
        if num_open >= MAX_FEEDS:
            raise unavailable("overloaded", f"{num_open} feeds are open, and no more can be", retry_after=10)
        num_open += 1
        setattr(request.state, WATCHING, True)

        def close() -> None:
            nonlocal num_open
            num_open -= 1

        return EventStream(
            feed_events(feed, blocks, over, after),
            on_close=close,
            send_timeout=service.settings.send_timeout,
            headers={},
        )

    return router
