"""Connections: bounded in number, and closed when a client neither sends nor reads what it should."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.auth.middleware import ALWAYS_OPEN
from server.edge import error_response
from server.errors import unavailable
from server.settings import Settings

KEEP_ALIVE_SECONDS = 75  # without a request
SPARE_CONNECTIONS = 256  # beyond the bound, that are told so; all others are closed at once
READ_BYTES_PER_SECOND = 1024  # of a reader who is behind
MAX_HEAD_BYTES = 64 * 1024  # of a request, where nobody says otherwise
SMALL_CHUNKS = 1024  # of a body, of any size; with more of them
MIN_CHUNK_BYTES = 64  # is what they have to hold on average
OTHER_DESCRIPTORS = 512  # files, pipes, children; each connection is one more
WATCHING = "watching"  # in the state of a request whose answer has no end of its own: nobody waits for its reader
_TOO_MANY = "too_many_connections"


def http_protocol(settings: Settings) -> Any:
    """What uvicorn takes for ``http``."""
    return partial(
        BoundedProtocol,
        max_connections=settings.max_connections,
        header_timeout=settings.header_timeout,
        send_timeout=settings.send_timeout,
    )


def allow_connections(count: int) -> None:
    """So many descriptors for this process, if it may have them: it starts with a thousand on many machines."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_DESCRIPTORS
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


class BoundedParser(h11.Connection):
    """h11's, which bounds a head only while it is incomplete, and the chunks of a body not at all.

    Each chunk takes as long to read as a large piece, so a body in crumbs would hold up everybody.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        """Raises h11.RemoteProtocolError for a client who asks too much, too."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_end
            self._num_bytes += len(event.data)
            if self._num_chunks > SMALL_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
                raise h11.RemoteProtocolError("the body comes in too many chunks")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            headers = sum(len(name) + len(value) + len(": \r\n") for name, value in event.headers)
            if len(event.target) + headers > self._max_head_bytes:
                raise h11.RemoteProtocolError("the head is too long", error_status_hint=431)
        return event


class BoundedProtocol(H11Protocol):
    """uvicorn's, which waits for ever for the head of a request and for a reader who does not read.

    Requests of a connection that is one too many are marked for :class:`ConnectionCapMiddleware`.
    """

    def __init__(
        self, *args: Any, max_connections: int, header_timeout: float, send_timeout: float, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        most = self.config.h11_max_incomplete_event_size
        self.conn = BoundedParser(MAX_HEAD_BYTES if most is None else most)
        self._max_connections = max_connections
        self._header_timeout = header_timeout
        self._send_timeout = send_timeout
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections + SPARE_CONNECTIONS:
            transport.abort()  # or there would be no descriptor left for who asks whether the server lives
            return
        if len(self.connections) > self._max_connections:
            self.app_state = {**self.app_state, _TOO_MANY: True}
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._drop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._await_head()  # of the next request a part has come

    def drop_watcher(self) -> None:
        """End the connection, whether or not its reader reads, if its last request was to watch."""
        if self.scope is not None and self.scope.get("state", {}).get(WATCHING):
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drop_send_timer()

    def on_response_complete(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self._await_reader()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # an answer has begun, or was given before the end of the body
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_head_timer()
        self._drop_send_timer()
        super().connection_lost(exc)

    def _drop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _drop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self._header_timeout, self.transport.close)

    def _await_reader(self) -> None:
        if self._send_timer is None:
            size = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(self._send_timeout, self._check_reader, size)

    def _check_reader(self, size_before: int) -> None:
        """It has to have read its share, or all of it, since ``size_before`` bytes were to be read."""
        self._send_timer = None
        size = self.transport.get_write_buffer_size()
        share = min(size_before, max(1, int(READ_BYTES_PER_SECOND * self._send_timeout)))
        if size_before and size > size_before - share:
            self.transport.abort()  # to close it would wait for the reader, too
        elif size > 0:
            self._await_reader()


class ConnectionCapMiddleware:
    """Answers what comes over a connection that is one too many; who asks whether the server lives hears from it."""

    def __init__(self, app: ASGIApp, count: Callable[[], None]) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope.get("state", {}).get(_TOO_MANY) or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        self._count()
        refusal = unavailable("overloaded", "too many connections are open")
        refusal.headers["Connection"] = "close"
        await error_response(refusal)(scope, receive, send)
