"""The stop watch on a server's event loop, and a round that reads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from bench.engine_process.__main__ import LARGE_TEXT, LOADS, bodies, run_round
from bench.engine_process.server import PATH, LagEndpoint
from bench.prompts import MIXED_LOAD
from server.app import create_app
from server.tokenizing import MAX_TOKENS
from tests.server.builders import MODEL_NAME, build_service, running, save_tiny_model


async def _stall(scope: Any, receive: Any, send: Any) -> None:
    time.sleep(0.2)  # noqa: ASYNC251 - holds up the loop, on purpose
    await PlainTextResponse("stalled")(scope, receive, send)


def test_a_pause_of_the_loop_is_seen_if_it_was_watched() -> None:
    async def test() -> None:
        transport = httpx.ASGITransport(LagEndpoint(_stall))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.get("/before")
            await client.post(PATH)
            await asyncio.sleep(0.02)
            assert (await client.get("/other")).text == "stalled"
            first = (await client.get(PATH)).json()
            assert first["max_ms"] > 100
            assert first["wakes"] > 0
            assert (await client.get(PATH)).json() == first  # nobody watches any more
            await client.post(PATH)
            await asyncio.sleep(0.02)
            assert (await client.get(PATH)).json()["max_ms"] < first["max_ms"]

    asyncio.run(test())


def test_the_long_text_is_taken_whatever_the_tokenizer() -> None:
    assert 32768 < len(LARGE_TEXT.encode()) <= MAX_TOKENS  # no byte is more than a token


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    service = build_service(save_tiny_model(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.server.builders.create_app", lambda service: LagEndpoint(create_app(service)))
        with running(service) as found:
            yield found


@pytest.mark.parametrize("load", LOADS)
def test_a_round_measures_the_load_and_the_loop(url: str, load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engine_process.__main__.LARGE_TEXT", "the quick " * 100)
    requests = [{**body, "prompt": "a b"} for body in bodies(MODEL_NAME, load, MIXED_LOAD[:2], 5, load)]
    found = asyncio.run(run_round(url, load, requests, 2))
    assert [trace.num_tokens for trace in found.traces] == [5, 5]
    assert found.lag.wakes > 0
    assert found.tokens_per_second > 0
