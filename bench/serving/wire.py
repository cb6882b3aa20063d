"""HTTP/1.1 for the load: h11 over asyncio's streams, so that reading a stream costs little beside the server's work.

A body is read as it arrives; every event of it gets the time at which its bytes came. No proxy is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from bench.foreign import ForeignError, parse_json, shown
from bench.serving.sse import EventReader, StreamError
from bench.serving.trace import CUT, ENGINE_FAILED, FAILED, OK, REFUSED, SHED_STATUSES, Trace

READ_BYTES = 65536
MAX_BODY_BYTES = 16 * 2**20
MAX_ERROR_BYTES = 65536
_NETWORK = (OSError, h11.ProtocolError, asyncio.IncompleteReadError, TimeoutError)


class WireError(RuntimeError):
    """No answer, or none that can be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    def error_text(self) -> str:
        """``400: what the server says``, one line."""
        message: object = ""
        with contextlib.suppress(ForeignError):
            value = parse_json(self.body)
            error = value.get("error", value) if isinstance(value, dict) else value
            message = error.get("message", "") if isinstance(error, dict) else error
        text = shown(" ".join(str(message or self.body[:200].decode("utf-8", "replace")).split()), 300)
        return f"{self.status}: {text}" if text else str(self.status)


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    parser: h11.Connection

    def abort(self) -> None:
        self.writer.transport.abort()


class Client:
    """Connections to one server, kept open between requests; as many at a time as there are requests.

    For one event loop. ``timeout``: seconds without a byte, after which a request has failed.
    """

    def __init__(self, base_url: str, *, api_key: str = "", timeout: float = 120.0) -> None:
        url = urlsplit(base_url)
        assert url.hostname is not None, base_url
        self.url = base_url
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._host, self._port = url.hostname, url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/")
        self._headers = [("Host", url.netloc.rpartition("@")[2]), ("Accept-Encoding", "identity")]
        if api_key:
            self._headers.append(("Authorization", f"Bearer {api_key}"))
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Answer:
        """Raises WireError if there is no answer."""
        return await self._whole("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Raises WireError if there is no answer."""
        return await self._whole("POST", path, body)

    async def stream(self, path: str, body: Mapping[str, Any], trace: Trace) -> None:
        """POST ``body`` and fill in ``trace`` until the answer is over. Raises nothing that the network can cause."""
        try:
            async with self._exchange("POST", path, body, trace) as (status, pieces):
                if status != 200:
                    await _refuse(trace, status, pieces)
                    return
                await _follow(trace, pieces)
        except StreamError as error:
            trace.outcome, trace.reason = FAILED, str(error)
        except _NETWORK as error:
            # A stream that broke after its first token is told apart from a server that cannot be reached.
            trace.outcome, trace.reason = (CUT if trace.chunks else FAILED), _name_of(error)
        finally:
            trace.ended = trace.ended or time.perf_counter()

    async def close(self) -> None:
        """The connections that nobody uses."""
        while self._idle:
            self._idle.pop().abort()
        await asyncio.sleep(0)  # a transport closes its socket in the loop's next turn

    async def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        content = bytearray()
        try:
            async with self._exchange(method, path, body, None) as (status, pieces):
                async for piece in pieces:
                    content += piece
                    if len(content) > MAX_BODY_BYTES:
                        raise WireError(f"{method} {path}: the answer is larger than {MAX_BODY_BYTES:,} bytes")
        except _NETWORK as error:
            raise WireError(f"{method} {path}: {_name_of(error)}") from error
        return Answer(status, bytes(content))

    @contextlib.asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, trace: Trace | None
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        content = b"" if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = list(self._headers)
        if body is not None:
            headers += [("Content-Type", "application/json"), ("Content-Length", str(len(content)))]
        request = h11.Request(method=method, target=self._prefix + path, headers=headers)
        connection, status = await self._send(request, content, trace)
        try:
            yield status, self._pieces(connection)
            whole = connection.parser.their_state is h11.DONE
        except BaseException:
            connection.abort()
            raise
        self._give_back(connection, whole)

    async def _send(self, request: h11.Request, content: bytes, trace: Trace | None) -> tuple[_Connection, int]:
        """Until the head of the answer has come. A kept connection may have been closed meanwhile: then a new one."""
        while True:
            kept = self._idle.pop() if self._idle else None
            if trace is not None:
                trace.sent = time.perf_counter()
            connection = kept or await self._connect()
            try:
                connection.writer.write(
                    (connection.parser.send(request) or b"")
                    + (connection.parser.send(h11.Data(data=content)) or b"" if content else b"")
                    + (connection.parser.send(h11.EndOfMessage()) or b"")
                )
                while True:
                    event = await self._next(connection)
                    if isinstance(event, h11.Response):
                        return connection, event.status_code
                    if not isinstance(event, h11.InformationalResponse):
                        raise ConnectionResetError("the connection was closed before an answer")
            except (ConnectionError, h11.RemoteProtocolError):
                connection.abort()
                if kept is None:
                    raise
            except BaseException:
                connection.abort()
                raise

    async def _connect(self) -> _Connection:
        async with asyncio.timeout(self._timeout):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Connection(reader, writer, h11.Connection(h11.CLIENT))

    async def _pieces(self, connection: _Connection) -> AsyncIterator[bytes]:
        while True:
            event = await self._next(connection)
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return
            else:
                raise ConnectionResetError("the connection was closed within an answer")

    async def _next(self, connection: _Connection) -> Any:
        while True:
            event = connection.parser.next_event()
            if event is not h11.NEED_DATA:
                return event
            async with asyncio.timeout(self._timeout):
                connection.parser.receive_data(await connection.reader.read(READ_BYTES))

    def _give_back(self, connection: _Connection, whole: bool) -> None:
        if whole:
            with contextlib.suppress(h11.LocalProtocolError):  # the server closes it
                connection.parser.start_next_cycle()
                self._idle.append(connection)
                return
        connection.abort()


async def _follow(trace: Trace, pieces: AsyncIterator[bytes]) -> None:
    reader = EventReader()
    done = False
    async for piece in pieces:
        now = time.perf_counter()
        for data in reader.feed(piece):
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError as error:
                raise StreamError("an event of the stream is not JSON") from error
            if not isinstance(event, dict):
                raise StreamError("an event of the stream is no object")
            if event.get("error") is not None:
                raise StreamError(f"an error event: {_message(event['error'])}")
            try:
                trace.take(event, now)
            except (AttributeError, TypeError) as error:
                raise StreamError("an event of the stream is no chunk of a completion") from error
    if done or trace.finish_reason is not None:
        trace.outcome, trace.reason = OK, ""
    else:
        trace.outcome, trace.reason = CUT, "the stream ended without [DONE] and without a finish_reason"


async def _refuse(trace: Trace, status: int, pieces: AsyncIterator[bytes]) -> None:
    content = bytearray()
    async for piece in pieces:
        content += piece[: MAX_ERROR_BYTES - len(content)]
    shed = status in SHED_STATUSES and ENGINE_FAILED.encode() not in content
    trace.outcome, trace.reason = (REFUSED if shed else FAILED), f"HTTP {Answer(status, bytes(content)).error_text()}"


def _message(error: Any) -> str:
    return shown(error.get("message", error) if isinstance(error, dict) else error)


def _name_of(error: BaseException) -> str:
    """Without addresses or ports, so that equal failures are counted as one."""
    if isinstance(error, TimeoutError):
        return "nothing came in time (--timeout)"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
    if not reason and isinstance(error, ConnectionResetError):
        reason = str(error)
    return f"{type(error).__name__}: {' '.join(reason.split())}" if reason else type(error).__name__
