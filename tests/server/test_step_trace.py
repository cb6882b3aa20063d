"""``speculation.trace``: where each token comes from, told to who asks, and nothing else changed by it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.service import Service
from server.shapes import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from tests.server.builders import MODEL_NAME, sse_events
from tests.server.chat_builders import HELLO

REPEATING = "0 1 2 0 1 2 0 1 2"
BODY: dict[str, Any] = {
    "model": MODEL_NAME, "prompt": REPEATING, "max_tokens": 40, "seed": 17, "return_token_ids": True,
}  # fmt: skip
SPECULATION = {"num_speculative_tokens": 4}
CASES: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.7},
    {"temperature": 0, "stop": ["2 0"]},
    {"temperature": 0, "prompt": [REPEATING, "a a a a"], "n": 2},
    {"temperature": 0, "max_tokens": 5, "echo": True, "logprobs": 1},
    {"speculation": {"num_speculative_tokens": 0}},
]


def post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def traced(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "speculation": {**body.get("speculation", SPECULATION), "trace": True}}


def check_steps(steps: list[dict[str, Any]], token_ids: list[int]) -> None:
    """They account for the tokens, one after the other."""
    assert [token for step in steps for token in step["emitted"]] == token_ids
    for i, step in enumerate(steps):
        accepted, emitted = step["accepted"], step["emitted"]
        assert emitted[:accepted] == step["drafted"][:accepted]
        last = i == len(steps) - 1
        assert len(emitted) == accepted + 1 or (last and len(emitted) == accepted)
        if len(emitted) > accepted and accepted < len(step["drafted"]) and not last:
            assert emitted[accepted] != step["drafted"][accepted], "a draft that came true was not accepted"
        assert len(step["texts"]) == len(emitted)
        assert len(step["rejected_texts"]) == len(step["drafted"]) - accepted
        assert (step["drafter"] is None) == (not step["drafted"])


@pytest.mark.parametrize("change", CASES, ids=str)
def test_the_steps_account_for_every_token_and_the_answer_is_the_one_without(
    http: httpx.Client, change: dict[str, Any]
) -> None:
    body = {"speculation": SPECULATION, **BODY, **change}
    plain = post(http, **body).json()
    answer = post(http, **traced(body)).json()
    CompletionAnswer.model_validate(answer)
    for choice, without in zip(answer["choices"], plain["choices"], strict=True):
        check_steps(choice.pop("speculation")["steps"], choice["token_ids"])
        assert choice == without
    assert answer["usage"] == plain["usage"]


def test_the_numbers_are_those_of_the_metrics_and_the_texts_make_the_text(http: httpx.Client) -> None:
    body = traced({**BODY, "temperature": 0, "ignore_eos": True})
    post(http, **body)  # the next is drafted from its output, if not sooner
    answer = post(http, **body).json()
    (choice,) = answer["choices"]
    steps, numbers = choice["speculation"]["steps"], answer["metrics"]["speculative_decoding"]
    with_drafts = [step for step in steps if step["drafted"]]
    assert [len(step["drafted"]) for step in with_drafts] == numbers["per_step_drafted"]
    assert [step["accepted"] for step in with_drafts] == numbers["per_step_accepted"]
    assert sum(numbers["per_step_accepted"]) > 0
    assert "".join(text for step in steps for text in step["texts"]) == choice["text"]


def test_a_draft_after_the_accepted_ones_was_not_the_models_token(http: httpx.Client) -> None:
    answer = post(http, **traced({**BODY, "temperature": 1.0, "max_tokens": 200, "ignore_eos": True})).json()
    steps = answer["choices"][0]["speculation"]["steps"][:-1]
    rejected = [step for step in steps if step["accepted"] < len(step["drafted"])]
    assert rejected, "nothing was rejected, so this shows nothing"
    assert all(step["emitted"][step["accepted"]] != step["drafted"][step["accepted"]] for step in rejected)


def test_the_chunks_have_the_steps_of_the_whole_answer(http: httpx.Client) -> None:
    body = traced({**BODY, "temperature": 0, "ignore_eos": True})
    (whole,) = post(http, **body).json()["choices"]
    chunks = sse_events(post(http, **body, stream=True).content)
    pieces: list[dict[str, Any]] = []
    for chunk in chunks:
        CompletionChunk.model_validate(chunk)
        pieces += chunk["choices"]  # type: ignore[arg-type]
    assert all("speculation" in piece for piece in pieces)
    assert all([t for s in p["speculation"]["steps"] for t in s["emitted"]] == p["token_ids"] for p in pieces)
    check_steps([step for piece in pieces for step in piece["speculation"]["steps"]], whole["token_ids"])


def test_a_chat_has_them_too(chat_http: httpx.Client) -> None:
    body: dict[str, Any] = {
        "model": MODEL_NAME, "messages": HELLO, "max_tokens": 30, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip
    plain = post(chat_http, "/v1/chat/completions", **body, speculation=SPECULATION).json()
    answer = post(chat_http, "/v1/chat/completions", **traced(body)).json()
    ChatAnswer.model_validate(answer)
    (choice,), (without,) = answer["choices"], plain["choices"]
    check_steps(choice.pop("speculation")["steps"], choice["token_ids"])
    assert choice == without
    chunks = sse_events(post(chat_http, "/v1/chat/completions", **traced(body), stream=True).content)
    steps: list[dict[str, Any]] = []
    for chunk in chunks:
        ChatChunk.model_validate(chunk)
        for piece in chunk["choices"]:  # type: ignore[attr-defined]
            steps += piece.get("speculation", {"steps": []})["steps"]
    check_steps(steps, choice["token_ids"])


def test_who_does_not_ask_gets_none(http: httpx.Client) -> None:
    for speculation in ({}, {"speculation": SPECULATION}, {"speculation": {"trace": False}}):
        assert "speculation" not in post(http, **BODY, **speculation).json()["choices"][0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_trace_and_one_token_a_chunk_exclude_each_other(chat_http: httpx.Client, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO}
    options = {"stream": True, "stream_options": {"one_token_per_chunk": True}}
    body = {"model": MODEL_NAME, "speculation": {"trace": True}, **prompt, **options}
    refused = chat_http.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation.trace"


def test_a_trace_that_is_no_switch_is_refused(http: httpx.Client) -> None:
    refused = http.post("/v1/completions", json={**BODY, "speculation": {"trace": 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "speculation.trace"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_where_it_is_switched_off_a_trace_is_refused_and_nothing_else(
    chat_http: httpx.Client, chat_service: Service, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_service, "settings", chat_service.settings.model_copy(update={"speculation_trace": False}))
    prompt: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO}
    body = {"model": MODEL_NAME, "max_tokens": 2, "stream": stream, **prompt}
    refused = chat_http.post(path, json={**body, "speculation": {"trace": True}})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "speculation.trace"
    assert "switched off" in error["message"]
    for speculation in (None, SPECULATION, {"trace": False}):
        assert chat_http.post(path, json={**body, "speculation": speculation}).status_code == 200
