"""No single request holds up the event loop, however much work it asks for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.app import create_app
from server.schemas import parse_completion
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service
from tests.server.chat_builders import save_chat_model
from tests.server.stalls import assert_refused_without_stall

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


@pytest.mark.parametrize(("change", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_a_request_that_asks_for_much_is_refused_without_holding_up_others(
    service: Service, change: dict[str, Any], param: str | None
) -> None:
    content = json.dumps({"model": MODEL_NAME, "prompt": "a", **change}).encode()
    assert_refused_without_stall(service, "/v1/completions", content, param, parse_completion)


def test_the_first_requests_find_all_parts_of_the_tokenizer_made(
    tiny_model: Path, model_home: Path, tmp_path: Path
) -> None:
    """Making the second copy of it takes a tenth of a second, in which nobody else runs."""
    service = build_service(save_chat_model(tiny_model, tmp_path / "model"), model_home)
    made = set(vars(service.tokenizer))
    chat = [{"role": "user", "content": "<|end|> of <|im_end|>" * 9}]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"messages": chat, "return_token_strs": True}),
        ("/tokenize", {"prompt": "the quick <|end|>", "return_token_strs": True}),
        ("/detokenize", {"tokens": list(range(90))}),
    ]

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return [(await client.post(path, json=body)).status_code for path, body in requests]

    assert asyncio.run(ask()) == [200] * len(requests)
    assert set(vars(service.tokenizer)) == made
