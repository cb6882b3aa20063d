"""Which tools may be called, and whether any: tool_choice."""

from __future__ import annotations

import httpx
import pytest

from server.tools.formats import ToolFormat
from tests.server.tool_builders import arguments_are_valid
from tests.server.tools.asking import IDS, TOKENIZER, answer, calls_of


@pytest.mark.parametrize("tool_format", ["hermes", "json"], indirect=True)
def test_a_named_function_is_called_once_and_no_other(http: httpx.Client, tool_format: ToolFormat) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    found = answer(http, tool_choice=choice, parallel_tool_calls=True)["choices"][0]
    ((name, arguments),) = calls_of(found)
    assert name == "add"
    assert arguments_are_valid(name, arguments)


def test_allowed_tools_are_the_only_ones_called_but_all_are_shown(http: httpx.Client) -> None:
    allowed = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": allowed}}
    for seed in range(3):
        found = answer(http, tool_choice=choice, parallel_tool_calls=False, seed=seed, return_token_ids=True)
        assert calls_of(found["choices"][0])[0][0] in ("add", "now")
        assert "get_weather" in TOKENIZER.decode(found["choices"][0]["prompt_token_ids"], False)


def test_with_none_the_model_sees_no_tools_and_all_text_is_content(http: httpx.Client) -> None:
    wanted = {"return_token_ids": True, "logit_bias": {str(IDS["<tool_call>"]): 100}, "max_completion_tokens": 5}
    none, without = answer(http, tool_choice="none", **wanted), answer(http, tools=..., **wanted)
    assert none["choices"] == without["choices"]
    (choice,) = none["choices"]
    assert choice["message"]["content"] == "<tool_call>" * 5
    assert "get_weather" not in TOKENIZER.decode(choice["prompt_token_ids"], False)
    shown = answer(http, tool_choice="auto", **wanted)["choices"][0]
    assert "get_weather" in TOKENIZER.decode(shown["prompt_token_ids"], False)


def test_with_auto_a_call_is_valid_from_its_opening_on(http: httpx.Client) -> None:
    bias = {str(IDS["<tool_call>"]): 100}
    found = answer(http, parallel_tool_calls=False, logit_bias=bias)["choices"][0]
    assert found["finish_reason"] == "tool_calls"
    ((name, arguments),) = calls_of(found)
    assert arguments_are_valid(name, arguments)
    several = answer(http, logit_bias=bias, max_completion_tokens=200)["choices"][0]
    assert len(calls_of(several)) > 1
    assert len({call["id"] for call in several["message"]["tool_calls"]}) == len(calls_of(several))
