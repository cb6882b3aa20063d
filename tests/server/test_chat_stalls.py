"""No chat holds up the event loop, however many messages, control tokens or calls it has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.chat.messages import MAX_MESSAGES, MAX_NAME
from server.chat.schema import parse_chat
from server.service import Service
from tests.server.builders import MODEL_NAME
from tests.server.stalls import assert_refused_without_stall

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


@pytest.mark.parametrize(("change", "param"), REFUSED.values(), ids=REFUSED.keys())
def test_a_chat_that_asks_for_much_is_refused_without_holding_up_others(
    chat_service: Service, change: dict[str, Any], param: str | None
) -> None:
    content = json.dumps({"model": MODEL_NAME, **change}, ensure_ascii=False).encode()
    assert len(content) > MAX_NAME
    assert_refused_without_stall(chat_service, "/v1/chat/completions", content, param, parse_chat)
