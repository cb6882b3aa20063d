"""Five hundred mixed requests, many of whom leave: nothing is left behind, and the survivors' answers are their own."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.server.builders import MODEL_NAME, metric
from tests.server.test_disconnect import assert_idle

REQUESTS = 500
AT_ONCE = 24


def _body(rng: random.Random, seed: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": [rng.randrange(3, 300) for _ in range(rng.choice((1, 5, 17, 60)))] * rng.choice((1, 2)),
        "max_tokens": rng.choice((1, 8, 24, 40)),
        "seed": seed,
        "return_token_ids": True,
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 2)),
        "speculation": {"num_speculative_tokens": rng.choice((0, 1, 4))},
    }
    extras: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 1},
        {"top_p": 0.8, "frequency_penalty": 0.5},
        {"min_p": 0.05, "logit_bias": {"40": 3}},
        {"temperature": 0, "stop": ["e", "th"]},
        {"repetition_penalty": 1.2, "min_tokens": 1},
    )
    return body | rng.choice(extras)


async def _answer(client: httpx.AsyncClient, body: dict[str, Any]) -> list[list[int]]:
    """Token ids by choice index."""
    ids: list[list[int]] = [[] for _ in range(body["n"])]
    if not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            ids[choice["index"]] += choice["token_ids"]
        return ids
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids[choice["index"]] += choice.get("token_ids") or []
    return ids


async def _soak(base: str) -> list[tuple[dict[str, Any], list[list[int]]]]:
    rng = random.Random(500)
    bodies = [_body(rng, seed) for seed in range(REQUESTS)]
    leaves_after = [rng.uniform(0, 0.4) if rng.random() < 0.4 else None for _ in bodies]
    survivors: list[tuple[dict[str, Any], list[list[int]]]] = []
    gate = asyncio.Semaphore(AT_ONCE)

    async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:

        async def one(body: dict[str, Any], leaves: float | None) -> None:
            async with gate:
                try:
                    survivors.append((body, await asyncio.wait_for(_answer(client, body), leaves)))
                except TimeoutError:
                    assert leaves is not None

        await asyncio.gather(*(one(body, leaves) for body, leaves in zip(bodies, leaves_after, strict=True)))
    return survivors


async def _alone(base: str, body: dict[str, Any]) -> list[list[int]]:
    off = {**body, "speculation": {"num_speculative_tokens": 0}}
    async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:
        return await _answer(client, off)


@pytest.mark.case("sglang-jax 1147")
def test_500_requests_with_random_aborts_and_disconnects_leave_nothing_behind(base: str) -> None:
    aborts = metric(base, "request_success_total", finished_reason="abort")
    survivors = asyncio.run(_soak(base))
    assert_idle(base)
    assert metric(base, "kv_blocks", state="free") + metric(base, "kv_blocks", state="cached") == 256
    assert metric(base, "request_success_total", finished_reason="abort") > aborts
    assert len(survivors) > REQUESTS // 2
    for body, ids in survivors[:: len(survivors) // 25]:
        assert asyncio.run(_alone(base, body)) == ids, body
