"""POST /tokenize and /detokenize: the tokenizer's own answer, bounded, with every error named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.resolve import ModelFacts
from server.service import Service
from server.tokenizing import MAX_TOKENS
from tests.server.builders import CONTEXT, EOS, MODEL_NAME
from tests.server.stalls import assert_others_are_served


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_ids_of_a_text_are_the_ones_a_completion_sees_and_become_the_text_again(
    http: httpx.Client, service: Service, text: str
) -> None:
    answer = post(http, "/tokenize", model=MODEL_NAME, prompt=text)
    assert answer["tokens"] == service.tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    assert answer["token_strs"] is None
    assert post(http, "/detokenize", model=MODEL_NAME, tokens=answer["tokens"])["prompt"] == text


def test_token_strings_are_spelled_as_in_logprobs(http: httpx.Client) -> None:
    text = "the quick 😀"
    strings = post(http, "/tokenize", prompt=text, return_token_strs=True)["token_strs"]
    body = {"model": MODEL_NAME, "prompt": text, "echo": True, "max_tokens": 0, "logprobs": 0}
    assert strings == post(http, "/v1/completions", **body)["choices"][0]["logprobs"]["tokens"]
    assert any(string.startswith("bytes:") for string in strings)


def test_special_tokens_are_in_the_text_of_ids(http: httpx.Client, service: Service) -> None:
    assert post(http, "/detokenize", tokens=service.tokenizer.encode(f"a{EOS}b"))["prompt"] == f"a{EOS}b"


def test_nothing_becomes_nothing(http: httpx.Client) -> None:
    assert post(http, "/tokenize", prompt="", return_token_strs=True) == {
        "count": 0,
        "max_model_len": CONTEXT,
        "tokens": [],
        "token_strs": [],
    }
    assert post(http, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs"),
        ("/tokenize", {"prompt": "a", "extra": 1}, "extra"),
        ("/tokenize", {"prompt": "a", "model": 1}, "model"),
        ("/tokenize", {"prompt": "a b " * (MAX_TOKENS * 4)}, "prompt"),
        ("/tokenize", {"prompt": "\x01" * (MAX_TOKENS + 1)}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [70] * (MAX_TOKENS + 1)}, "tokens"),
        ("/detokenize", {"tokens": [1], "prompt": "a"}, "prompt"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(response.json()["error"]["message"]) < 300


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}, {"tools": [WEATHER], "tool_choice": "none"}], ids=str)
def test_ids_of_a_chat_are_those_of_the_same_chat_as_a_request(chat_http: httpx.Client, more: dict[str, Any]) -> None:
    chat = {"messages": [{"role": "user", "content": f"Hello {EOS} moon"}], **more}
    tokens = post(chat_http, "/tokenize", **chat, add_generation_prompt=True)["tokens"]
    body = {"model": MODEL_NAME, **chat, "max_tokens": 1, "return_token_ids": True}
    response = chat_http.post("/v1/chat/completions", json=body)
    assert response.json()["usage"]["prompt_tokens"] == len(tokens)
    assert response.json()["choices"][0]["prompt_token_ids"] == tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"prompt": "a"}, "prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "x"}, "chat_template"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
    ids=str,
)
def test_a_chat_that_cannot_be_is_refused_by_name(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}], **change})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "cannot be combined with messages"),
        ({"prompt": "a", "tools": []}, "tools", "is of a chat, which has messages"),
        ({"prompt": "a", "tool_choice": "none"}, "tool_choice", "is of a chat, which has messages"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "is of a chat, which has messages"),
        ({"tools": []}, "tools", "is of a chat, which has messages"),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_said(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    response = http.post("/tokenize", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert f"{param} {message}" in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_another_model_is_a_404(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json={**body, "model": "other"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_ids_go_up_to_the_embedding(http: httpx.Client, service: Service) -> None:
    facts: ModelFacts = service.facts
    assert http.post("/detokenize", json={"tokens": [facts.embedding_rows - 1]}).status_code == 200
    assert http.post("/detokenize", json={"tokens": [facts.embedding_rows]}).status_code == 400


def test_the_largest_texts_do_not_hold_up_the_loop(http: httpx.Client, base: str) -> None:
    text = "the quick brown fox " * 12_000
    answers: list[dict[str, Any]] = []

    def send() -> None:
        body = {"prompt": text, "return_token_strs": True}
        answers.append(httpx.post(f"{base}/tokenize", json=body, timeout=60).json())
        answers.append(httpx.post(f"{base}/detokenize", json={"tokens": answers[0]["tokens"]}, timeout=60).json())

    assert_others_are_served(http, send)
    assert answers[1]["prompt"] == text
    assert len(answers[0]["token_strs"]) == answers[0]["count"] > MAX_TOKENS // 2
