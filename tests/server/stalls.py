"""Requests that ask for much, and how long they hold up everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from server.app import create_app
from server.body import parse_json_object
from server.errors import APIError
from server.service import Service
from tests.pauses import pauses


def assert_refused_without_stall(
    service: Service, path: str, content: bytes, param: str | None, parse: Callable[[dict[str, Any]], object]
) -> None:
    """A 400 that names ``param``, while the event loop goes on. ``parse``: what the endpoint does with a body."""
    assert len(content) <= service.settings.max_body_bytes
    began = time.perf_counter()
    with contextlib.suppress(APIError):
        parse(parse_json_object(content))
    parsing = time.perf_counter() - began
    response, duration, longest = asyncio.run(_post(service, path, content))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    # Some of the parsing happens in single calls that let nobody else run.
    assert longest < max(duration / 2, 5 * parsing)


async def _post(service: Service, path: str, content: bytes) -> tuple[httpx.Response, float, float]:
    """The answer, its duration, and the longest time in which the loop did nothing else."""
    headers = {"Content-Type": "application/json"}
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        asking = asyncio.create_task(client.post(path, content=content, headers=headers))
        longest, duration = await pauses(asking)
        return asking.result(), duration, longest


def assert_others_are_served(http: httpx.Client, send: Callable[[], object]) -> None:
    """While ``send`` works."""
    sender = threading.Thread(target=send)
    sender.start()
    served = 0
    while sender.is_alive():
        assert http.get("/live").status_code == 200
        served += 1
    assert served > 0
