"""Request bodies: bounded while they arrive, strict when parsed."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from server.errors import APIError, bad_request, shorten, unavailable

T = TypeVar("T")

MAX_DEPTH = 64
MAX_CONTAINERS = 65536  # lists and objects, which cost far more than the bytes that they are made of
# Bodies above this are parsed in a thread, so that one client cannot hold up the event loop.
THREAD_ABOVE_BYTES = 64 * 1024

# Possessive, and a missing end quote is fine: linear on any input.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyMemory:
    """Bounds the bytes of all bodies that are read or parsed at one time: who sends slowly holds what has arrived.

    For the event loop's thread. ``count`` hears of each refusal.
    """

    def __init__(self, limit: int, count: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._count = count
        self.held = 0

    @contextmanager
    def holding(self) -> Iterator[Callable[[int], None]]:
        """A function that takes more bytes for one body; they are given back at the end. It raises APIError 503."""
        mine = 0

        def take(num_bytes: int) -> None:
            nonlocal mine
            if self.held + num_bytes > self._limit:
                self._count()
                refusal = unavailable("overloaded", f"request bodies of {self.held} bytes are being read")
                refusal.headers["Connection"] = "close"  # what is left of the body is not read
                raise refusal
            self.held += num_bytes
            mine += num_bytes

        try:
            yield take
        finally:
            self.held -= mine


async def read_json_object(
    request: Request, *, max_bytes: int, deadline: float, memory: BodyMemory, parse: Callable[[dict[str, Any]], T]
) -> T:
    """``parse`` of the body, which must be a JSON object and arrive within ``deadline`` seconds.

    Raises what ``parse`` raises, and APIError: 400, 408 (slow), 413 (too large), 415 (not JSON) or 503.
    """
    _check_media_type(request)
    with memory.holding() as take:
        try:
            async with asyncio.timeout(deadline):
                body = await _read(request, max_bytes, take)
        except TimeoutError:
            message = f"the request body did not arrive within {deadline:g} seconds"
            raise APIError(408, message, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise bad_request("the request body is incomplete", None) from None
        if len(body) > THREAD_ABOVE_BYTES:
            return await asyncio.to_thread(lambda: parse(parse_json_object(body)))
        return parse(parse_json_object(body))


def _check_media_type(request: Request) -> None:
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise APIError(415, "the body must be JSON: send the header Content-Type: application/json")
    for parameter in parameters.split(";"):  # others than the charset mean nothing for JSON
        name, _, charset = parameter.partition("=")
        if name.strip().lower() == "charset" and charset.strip().strip('"').lower() not in ("utf-8", "utf8"):
            raise APIError(415, f"the body must be JSON in UTF-8; its charset is {shorten(charset.strip())}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise APIError(415, "a compressed body is not supported")


async def _read(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > max_bytes:
            raise too_large(max_bytes)
        take(len(piece))
        body += piece
    return bytes(body)


def too_large(max_bytes: int) -> APIError:
    # What is left of the body is never read, so the connection cannot be used again.
    return APIError(413, f"the request body is larger than {max_bytes} bytes", headers={"Connection": "close"})


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Parse strictly: no NaN or Infinity, no number beyond a double, no duplicate key, valid Unicode, bounded depth."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise bad_request(f"the body is not valid UTF-8 (byte {exc.start})", None) from None
    _check_brackets(body)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except json.JSONDecodeError as exc:
        raise bad_request(
            f"the body is not valid JSON: {exc.msg} (line {exc.lineno}, column {exc.colno})", None
        ) from None
    except RecursionError:
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels", None) from None
    except ValueError as exc:
        # An integer of more digits than Python converts.
        raise bad_request("the body holds a number that is too long", None) from exc
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None)
    if _SURROGATE_ESCAPE.search(body):
        _check_unicode(value)
    return value


def _check_brackets(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return  # as in every ordinary body: looking for strings holds up all other threads for milliseconds a megabyte
    depth = opened = 0
    for match in _BRACKET.finditer(_STRING.sub(b"", body)):
        if match[0] in b"[{":
            depth += 1
            opened += 1
            if opened > MAX_CONTAINERS:
                raise bad_request(f"the body holds more than {MAX_CONTAINERS} lists and objects", None)
            if depth > MAX_DEPTH:
                raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels", None)
        else:
            depth -= 1


def _refuse_constant(name: str) -> float:
    raise bad_request(f"the body holds {name}, which is not JSON", None)


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise bad_request(f"the body holds the number {literal[:32]}, which is too large", None)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                # The name may hold a lone surrogate, which no answer could carry.
                safe = name[:64].encode("utf-8", "replace").decode()
                raise bad_request(f"the body holds the name {safe!r} twice in one object", safe)
            seen.add(name)
    return result


def _check_unicode(value: object) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise bad_request("the body holds a lone surrogate, which is not valid Unicode", None) from None
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
