"""HTTP/1.1 over the standard library: a body is read as it arrives, chunk by chunk.

``http.client`` because its ``read1`` gives what has come and waits for no more; clients that read a number of bytes, or
lines, hold tokens back. Under locust its sockets are gevent's. No proxy is asked.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from .record import Record
from .sse import EventReader, StreamError

READ_BYTES = 65536
MAX_ERROR_BYTES = 65536
MAX_BODY_BYTES = 2**26


class ClientError(RuntimeError):
    """No answer, or none that can be used; the message is one line."""


class Client:
    """Connections to one server, kept open between requests; as many at a time as there are requests.

    Raises ValueError for a URL that is not ``http://`` or ``https://`` with a host.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``timeout``: seconds without a byte, after which a request has failed."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"the host must be like http://127.0.0.1:8000; it is {base_url!r}")
        self._host, self._port, self._prefix = url.hostname, url.port, url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._headers = dict(headers or {})
        self._timeout = timeout
        self._clock = clock
        self._idle: list[http.client.HTTPConnection] = []

    def stream(self, path: str, body: Mapping[str, Any], record: Record, leave_after: int | None = None) -> None:
        """POST ``body`` and fill in ``record`` until the answer is over. Raises nothing that the network can cause.

        ``leave_after``: close the connection once so many tokens have come.
        """
        try:
            connection, response = self._send("POST", path, body)
        except (OSError, http.client.HTTPException) as error:
            record.fail(_name_of(error), self._clock())
            return
        whole = False
        try:
            if response.status != 200:
                content = response.read(MAX_ERROR_BYTES)
                headers = {name.lower(): value for name, value in response.getheaders()}
                record.refuse(response.status, headers, content, self._clock())
                whole = response.isclosed()
                return
            reader = EventReader()
            while piece := response.read1(READ_BYTES):
                now = self._clock()
                for data in reader.feed(piece):
                    record.take(data, now)
                if leave_after is not None and record.outcome == "open" and record.num_tokens >= leave_after:
                    record.leave(now)
                    return
            record.end(self._clock())
            whole = True
        except (OSError, http.client.HTTPException, StreamError) as error:
            if record.outcome == "open":
                record.fail(_name_of(error), self._clock())
        finally:  # also when locust ends this greenlet: a closed connection tells the server
            self._give_back(connection, whole)

    def get(self, path: str) -> bytes:
        """The body of a 200. Raises ClientError for anything else."""
        return self._whole("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a 200. Raises ClientError for anything else."""
        content = self._whole("POST", path, body)
        try:
            return json.loads(content)
        except ValueError as error:
            raise ClientError(f"POST {path} answered no JSON") from error

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        try:
            connection, response = self._send(method, path, body)
            try:
                content = response.read(MAX_BODY_BYTES)
            finally:
                self._give_back(connection, response.isclosed())
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{method} {self._prefix}{path}: {_name_of(error)}") from error
        if response.status != 200:
            raise ClientError(f"{method} {self._prefix}{path} answered {response.status}")
        return content

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Until the headers have come. A connection that was kept may have been closed meanwhile: then a new one."""
        content = None if body is None else json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        while True:
            kept = self._idle.pop() if self._idle else None
            connection = kept or self._connect()
            try:
                connection.request(method, self._prefix + path, content, headers)
                return connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if kept is None:
                    raise
            except BaseException:
                connection.close()
                raise

    def _connect(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)

    def _give_back(self, connection: http.client.HTTPConnection, whole: bool) -> None:
        if whole and connection.sock is not None:
            self._idle.append(connection)
        else:
            with contextlib.suppress(OSError):
                connection.close()


def _name_of(error: BaseException) -> str:
    """Without numbers of connections or bytes, so that equal failures are counted as one."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
    if isinstance(error, StreamError):
        reason = str(error)
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__
