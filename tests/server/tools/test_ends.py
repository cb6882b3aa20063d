"""How an answer with calls ends, and what becomes of a call that is cut."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.service import Service
from server.tools.formats import MISTRAL
from tests.server.builders import sse_events
from tests.server.chat_builders import joined_chat
from tests.server.tool_builders import NOW, TEMPLATE, arguments_are_valid
from tests.server.tools.asking import GET_WEATHER, IDS, TOKENIZER, answer, calls_of, post, use, without_ids


def test_an_answer_that_is_cut_off_ends_for_its_length(http: httpx.Client) -> None:
    ((_, arguments),) = calls_of(answer(http, tool_choice=GET_WEATHER)["choices"][0])
    seen = []
    for limit in (1, 25, 45):
        cut = answer(http, tool_choice=GET_WEATHER, max_completion_tokens=limit)["choices"][0]
        assert cut["finish_reason"] == "length"
        calls = calls_of(cut)
        assert bool(cut["message"]["content"]) != bool(calls)  # what has not become a call is content
        assert all(name == "get_weather" and arguments.startswith(begun) for name, begun in calls)
        seen.append(bool(calls))
    assert seen == [False, False, True]


@pytest.mark.parametrize("stop", ["get_", "</tool_call>", "\n<", "<tool_call>\n{", '"}}', "never"])
def test_a_stop_string_is_no_end_of_a_call(http: httpx.Client, stop: str) -> None:
    for include in (False, True):
        wanted = {
            "tool_choice": "required",
            "stop": [stop],
            "include_stop_str_in_output": include,
            "logit_bias": {str(TOKENIZER.encode("g")[0]): 3},
            "max_completion_tokens": 300,
        }
        whole = answer(http, **wanted)["choices"]
        chunks: list[Any] = sse_events(post(http, stream=True, **wanted).content)
        assert without_ids(joined_chat(chunks)) == without_ids(whole)
        (choice,) = whole
        if stop == "never":
            assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", TOKENIZER.eos_token_id)
        else:
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
            assert bool(calls_of(choice)) == (stop != "<tool_call>\n{")


def test_a_stop_token_of_the_client_is_no_end_of_a_call(http: httpx.Client) -> None:
    found = answer(http, tool_choice=GET_WEATHER, stop_token_ids=[IDS["</tool_call>"]])["choices"][0]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", IDS["</tool_call>"])
    ends = answer(http, tool_choice=GET_WEATHER, stop_token_ids=[TOKENIZER.eos_token_id])["choices"][0]
    assert (ends["finish_reason"], ends["stop_reason"]) == ("tool_calls", TOKENIZER.eos_token_id)
    for choice in (found, ends):
        ((name, arguments),) = calls_of(choice)
        assert arguments_are_valid(name, arguments)


def test_a_list_of_calls_that_is_cut_off_leaves_no_content(http: httpx.Client, service: Service) -> None:
    with use(service, MISTRAL, TEMPLATE):
        wanted = {"tools": [NOW], "tool_choice": "required", "logit_bias": {str(TOKENIZER.encode(",")[0]): 100}}
        seen = set()
        for limit in range(34, 74, 4):
            whole = answer(http, **wanted, max_completion_tokens=limit)["choices"]
            chunks: list[Any] = sse_events(post(http, **wanted, max_completion_tokens=limit, stream=True).content)
            assert without_ids(joined_chat(chunks)) == without_ids(whole)
            (choice,) = whole
            assert choice["finish_reason"] == "length"
            if calls_of(choice):
                seen.add(len(calls_of(choice)))
                assert choice["message"]["content"] is None
        assert {1, 2} <= seen


def test_special_tokens_mark_calls_and_are_no_content(http: httpx.Client, service: Service) -> None:
    with use(service, MISTRAL, TEMPLATE):
        wanted = {"logit_bias": {str(IDS["[TOOL_CALLS]"]): 100}, "parallel_tool_calls": False}
        found = answer(http, **wanted)["choices"][0]
        assert found["message"]["content"] is None
        assert len(calls_of(found)) == 1
        cut = answer(http, **wanted, max_completion_tokens=3)["choices"][0]
        assert "[TOOL_CALLS]" not in cut["message"]["content"]
        shown = answer(http, **wanted, max_completion_tokens=3, skip_special_tokens=False)["choices"][0]
        assert shown["message"]["content"].startswith("[TOOL_CALLS]")


def test_where_a_grammar_holds_the_answer_its_end_cannot_be_ignored(http: httpx.Client) -> None:
    for tool_choice in ("auto", "required", GET_WEATHER):
        for stream in (False, True):
            response = post(http, tool_choice=tool_choice, ignore_eos=True, stream=stream)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "ignore_eos"
            assert "ignore_eos cannot be combined with tools" in error["message"]
    free = answer(http, tool_choice="none", ignore_eos=True, max_completion_tokens=5)
    assert free["usage"]["completion_tokens"] == 5


def test_fewest_tokens_that_a_grammar_cannot_reach_are_named(http: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    error = post(http, tool_choice=choice, min_tokens=90).json()["error"]
    assert "min_tokens (90" in error["message"]
    found = answer(http, tool_choice="auto", min_tokens=20, logit_bias={str(TOKENIZER.eos_token_id): 100})
    assert found["usage"]["completion_tokens"] >= 20
