"""Reads a server's state and feed over HTTP, with nothing but the standard library: it may run where little is."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from server.commands import CommandError

ANSWER_SECONDS = 10.0
SILENCE_SECONDS = 45.0  # a feed says something more often
MAX_LINE_BYTES = 64 * 2**20


class ServerAway(Exception):
    """It does not answer, or not with what can be used; the message is one line. It may come back."""


class UiClient:
    """Of one server. Raises CommandError for an address or a key that will never do."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self._parts = _checked(self.url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def state(self) -> dict[str, Any]:
        """What GET /ui/state answers. Raises ServerAway or CommandError."""
        connection = self._connect(ANSWER_SECONDS)
        try:
            found = json.loads(self._get(connection, "/ui/state").read())
            if not isinstance(found, dict) or "server" not in found:
                raise ServerAway(f"{self.url} answers with what is no state of a truedraft server")
            return found
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerAway(_reason(self.url, error)) from None
        finally:
            connection.close()

    def events(self, after: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and data of each event of GET /ui/feed, until the server ends it. Raises as ``state`` does."""
        connection = self._connect(SILENCE_SECONDS)
        try:
            response = self._get(connection, f"/ui/feed?after={after}")
            name = ""
            while line := response.readline(MAX_LINE_BYTES):
                field, _, value = line.decode("utf-8").rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerAway(_reason(self.url, error)) from None
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=timeout)

    def _get(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        connection.request("GET", self._parts.path + path, headers=self._headers)
        response = connection.getresponse()
        if response.status == 200:
            return response
        if response.status == 401 and self._headers:
            raise CommandError(f"{self.url} does not take the API key in the variable that --api-key-env names")
        if response.status == 401:
            raise CommandError(f"{self.url} wants an API key; name the variable that holds it with --api-key-env")
        if response.status == 404:
            raise CommandError(f"{self.url} has no /ui: it was started with --no-ui, or is no truedraft server")
        raise ServerAway(f"{self.url} answers {response.status}")


def _checked(url: str) -> SplitResult:
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise CommandError(f"--url {url!r} is no address of a server; write it as http://127.0.0.1:8000")
    return parts


def _reason(url: str, error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{url} does not answer ({' '.join(str(text).split())})"
