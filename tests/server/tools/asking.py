"""Requests with tools, and what tests look at in their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx

from server.service import Service
from server.tools.formats import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from server.tools.plan import ToolSupport
from tests.server.builders import MODEL_NAME
from tests.server.tool_builders import TOOLS, added_tokens, tool_tokenizer

ASK = [{"role": "user", "content": "the quick brown fox"}]
TOKENIZER = tool_tokenizer()
IDS = {text: token_id for token_id, text in TOKENIZER.added_tokens.items()}
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral args": MISTRAL_ARGS, "json": JSON}
GET_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
PLAIN = {"num_speculative_tokens": 0}


@contextlib.contextmanager
def use(service: Service, tool_format: ToolFormat, template: str) -> Iterator[ToolFormat]:
    """The server, as if its model had this template and wrote calls so."""
    found = service.tools
    service.tools = ToolSupport(tool_format, added_tokens(TOKENIZER), template)
    try:
        yield tool_format
    finally:
        service.tools = found


def body(**changes: Any) -> dict[str, Any]:
    given = {"model": MODEL_NAME, "messages": ASK, "tools": TOOLS, "max_completion_tokens": 100, "seed": 3, **changes}
    return {name: value for name, value in given.items() if value is not ...}


def post(http: httpx.Client, **changes: Any) -> httpx.Response:
    return http.post("/v1/chat/completions", json=body(**changes))


def answer(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    response = post(http, **changes)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])
    ]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids of calls are drawn anew for each answer; the prompt's stand in a stream's first chunk."""
    for choice in choices:
        choice.pop("prompt_token_ids", None)
        for call in choice["message"].get("tool_calls", []):
            assert call.pop("id")
    return choices
