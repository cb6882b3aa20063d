"""No single request holds up the event loop, however much work it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import httpx
import pytest

from server.app import create_app
from server.body import parse_json_object
from server.errors import APIError
from server.schemas import parse_completion
from server.service import Service
from tests.pauses import pauses
from tests.server.builders import MODEL_NAME

SIZE = 2_000_000  # bytes, just below the cap

REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "a long text": ({"prompt": "hello world, how are you? " * (SIZE // 26)}, "prompt"),
    "a long text, cut": (
        {"prompt": "the quick brown fox " * (SIZE // 20), "truncate_prompt_tokens": 510, "max_tokens": 10},
        "prompt",
    ),
    "many texts, cut": (
        {"prompt": ["the quick brown fox " * (SIZE // 1200)] * 60, "truncate_prompt_tokens": 510, "max_tokens": 10},
        "prompt",
    ),
    "many ids": ({"prompt": [70] * (SIZE // 4)}, "prompt"),
    "many prompts": ({"prompt": [[70]] * (SIZE // 6)}, None),
    "long bad words": ({"bad_words": [f"word{i} " * 200 for i in range(SIZE // 1800)]}, "bad_words"),
    "many bad words": ({"bad_words": ["ab"] * (SIZE // 6)}, "bad_words"),
    "many allowed ids": ({"allowed_token_ids": [70] * (SIZE // 4)}, "allowed_token_ids"),
    "many stop ids": ({"stop_token_ids": [70] * (SIZE // 4)}, "stop_token_ids"),
    "many stop strings": ({"stop": ["ab"] * (SIZE // 6)}, "stop"),
    "much bias": ({"logit_bias": {str(i): 1 for i in range(SIZE // 12)}}, "logit_bias"),
    "much metadata": ({"metadata": {str(i): 1 for i in range(SIZE // 12)}}, "metadata"),
    "many options": ({"stream_options": {str(i): 1 for i in range(SIZE // 12)}}, "stream_options"),
    "much speculation": ({"speculation": {str(i): 1 for i in range(SIZE // 12)}}, "speculation"),
    "a long prediction": (
        {"prediction": {"type": "content", "content": "hello world, how are you? " * (SIZE // 26)}},
        "prediction",
    ),
    "many parts": (
        {"prediction": {"type": "content", "content": [{"type": "text", "text": "a"}] * 60_000}},
        "prediction.content",
    ),
    "much prediction": ({"prediction": {str(i): 1 for i in range(SIZE // 12)}}, "prediction"),
    "many objects": ({"metadata": {"a": [{}] * (SIZE // 4)}}, None),
}


async def post(service: Service, content: bytes) -> tuple[httpx.Response, float, float]:
    """The answer, its duration, and the longest time in which the loop did nothing else."""
    headers = {"Content-Type": "application/json"}
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        asking = asyncio.create_task(client.post("/v1/completions", content=content, headers=headers))
        longest, duration = await pauses(asking)
        return asking.result(), duration, longest


@pytest.mark.parametrize(("change", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_a_request_that_asks_for_much_is_refused_without_holding_up_others(
    service: Service, change: dict[str, Any], param: str | None
) -> None:
    content = json.dumps({"model": MODEL_NAME, "prompt": "a", **change}).encode()
    assert len(content) <= service.settings.max_body_bytes
    began = time.perf_counter()
    with contextlib.suppress(APIError):
        parse_completion(parse_json_object(content))
    parsing = time.perf_counter() - began
    response, duration, longest = asyncio.run(post(service, content))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    # Some of the parsing happens in single calls that let nobody else run.
    assert longest < max(duration / 2, 5 * parsing)
