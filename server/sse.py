"""Server-sent events: LF only, one ``data:`` line an event, an end that is always ``[DONE]``."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

logger = logging.getLogger("truedraft.sse")

DONE = b"data: [DONE]\n\n"
NEVER = 10**6  # seconds between pings: tokens flow, and a comment line between them confuses some clients

# Line ends in the eyes of some clients (httpx splits lines at them); JSON itself escapes only those below U+0020.
_LINE_ENDS = re.compile("[\x7f-\x9f\u2028\u2029]")


def dump_json(value: Mapping[str, Any]) -> bytes:
    return json_text(value).encode()


def json_text(value: object) -> str:
    """Without line ends, whoever looks for them."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def data_event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + dump_json(value) + b"\n\n"


class EventStream(EventSourceResponse):
    """``on_close`` runs when the response is over, however it ends, even if it never began."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        on_close: Callable[[], None],
        send_timeout: float,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(events, headers=headers, sep="\n", ping=NEVER, send_timeout=send_timeout)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.warning("a reader did not read for %g seconds; its request is aborted", self.send_timeout)
        finally:
            self._on_close()
