"""The outermost layer: whatever goes wrong inside becomes a plain error."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from server.edge import EdgeMiddleware


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("secret at 0xdeadbeef")


@pytest.mark.parametrize("path", ["/x", "/health"])
def test_an_unforeseen_exception_is_a_500_that_tells_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(EdgeMiddleware(failing))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers={"X-Request-Id": "r1"})

    with caplog.at_level(logging.INFO, "truedraft.access"):
        response = asyncio.run(get())
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "r1"
    assert response.json()["error"] == {
        "message": "the server failed",
        "type": "server_error",
        "param": None,
        "code": "server_error",
    }
    (failure,) = [record for record in caplog.records if record.exc_info]
    assert failure.request_id == "r1"  # type: ignore[attr-defined]
