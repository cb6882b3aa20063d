"""No single request holds up the event loop, however much work it asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.schemas import parse_completion
from server.service import Service
from tests.server.builders import MODEL_NAME
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
