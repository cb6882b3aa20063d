"""No chat holds up the event loop, however many messages, control tokens or calls it has."""

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
from server.chat.messages import MAX_MESSAGES, MAX_NAME
from server.chat.schema import parse_chat
from server.errors import APIError
from server.service import Service
from tests.pauses import pauses
from tests.server.builders import MODEL_NAME

SIZE = 2_000_000  # bytes, just below the cap


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def called(arguments: str, count: int) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call] * count}


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "a long message": ({"messages": [user("hello world, how are you? " * (SIZE // 26))]}, "messages"),
    "a long message, cut": (
        {"messages": [user("the quick brown fox " * (SIZE // 20))], "truncate_prompt_tokens": 511, "max_tokens": 10},
        "messages",
    ),
    "as many messages as there may be": ({"messages": [user("a" * 400)] * MAX_MESSAGES}, "messages"),
    "too many messages": ({"messages": [user("a")] * 60_000}, "messages"),
    "many control tokens": ({"messages": [user("<|im_end|>a" * (SIZE // 11))]}, "messages"),
    "many halves of control tokens": ({"messages": [user("<|im_" * (SIZE // 5))]}, "messages"),
    "many placeholders": ({"messages": [user("".join(map(chr, range(0x100000, 0x10FFFE))) * 7)]}, "messages"),
    "long calls": ({"messages": [called(json.dumps({"a": "b" * (SIZE // 130)}), 128)]}, "messages"),
    "deep calls": (
        {"messages": [called('{"a":' + "[" * (SIZE // 2), 1)]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "long parts": ({"messages": [user([{"type": "text", "text": "a" * (SIZE // 1100)}] * 1000)]}, "messages"),
    "a long name": ({"messages": [{**user("a"), "name": "x" * (SIZE // 2)}]}, "messages[0].name"),
    "many members": ({"messages": [{**user("a"), **{str(i): 1 for i in range(SIZE // 14)}}]}, "messages[0].0"),
    "many objects": ({"messages": [[{}] * (SIZE // 4)]}, None),
}  # fmt: skip


async def post(service: Service, content: bytes) -> tuple[httpx.Response, float, float]:
    """The answer, its duration, and the longest time in which the loop did nothing else."""
    headers = {"Content-Type": "application/json"}
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", content=content, headers=headers))
        longest, duration = await pauses(asking)
        return asking.result(), duration, longest


@pytest.mark.parametrize(("change", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_a_chat_that_asks_for_much_is_refused_without_holding_up_others(
    chat_service: Service, change: dict[str, Any], param: str | None
) -> None:
    content = json.dumps({"model": MODEL_NAME, **change}, ensure_ascii=False).encode()
    assert MAX_NAME < len(content) <= chat_service.settings.max_body_bytes
    began = time.perf_counter()
    with contextlib.suppress(APIError):
        parse_chat(parse_json_object(content))
    parsing = time.perf_counter() - began
    response, duration, longest = asyncio.run(post(chat_service, content))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    # Some of the parsing happens in single calls that let nobody else run.
    assert longest < max(duration / 2, 5 * parsing)
