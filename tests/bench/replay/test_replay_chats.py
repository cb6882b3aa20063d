"""``truedraft replay`` of chats: the message comes again, calls and all, however the answer was sent and saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bench.replay.record import SavedPair, read_record
from server.commands import CommandError
from server.service import Service
from tests.bench.replay.builders import edited, judged, places, said, write
from tests.server.builders import MODEL_NAME, running, sse_events
from tests.server.tool_builders import TOOLS, save_tool_model

ASK = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
CALLS = {"tools": TOOLS, "tool_choice": "required", "max_completion_tokens": 150, "return_token_ids": True, "seed": 3}
BODIES: dict[str, dict[str, Any]] = {
    "a text": {},
    "everything": {
        "seed": 5,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "max_completion_tokens": 6,
    },
    "calls": CALLS,
    "a format": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1, 22]}}}},
    "streamed": {"stream": True, "ignore_eos": True},
    "streamed calls": {**CALLS, "stream": True, "stream_options": {"include_usage": True}},
    "streamed token by token": {
        "stream": True,
        "stream_options": {"one_token_per_chunk": True},
        "logprobs": True,
        "return_token_ids": True,
        "max_completion_tokens": 8,
        "n": 2,
    },
}
STREAMS = [name for name in BODIES if "stream" in BODIES[name]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tool_model(tmp_path_factory.mktemp("tools") / "model", "hermes")


def body_of(name: str) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": ASK, "max_completion_tokens": 20, **BODIES[name]}


@pytest.fixture(scope="module")
def saved(fresh: Callable[[], Service]) -> dict[str, dict[str, Any]]:
    """What a client keeps of each request and its answer."""
    pairs = {}
    with running(fresh()) as base:
        with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
            for name in BODIES:
                answer = client.post("/v1/chat/completions", json=body_of(name))
                assert answer.status_code == 200, answer.text
                response = sse_events(answer.content) if name in STREAMS else answer.json()
                pairs[name] = {"request": body_of(name), "response": response}
        with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
            pairs |= {f"openai: {name}": by_openai(client, name) for name in ("calls", "streamed calls")}
    return pairs


def by_openai(client: openai.OpenAI, name: str) -> dict[str, Any]:
    """The objects that the client makes of an answer have nulls where the answer had nothing."""
    body = body_of(name)
    extra = {"return_token_ids": body.pop("return_token_ids")}
    answer: Any = client.chat.completions.create(**body, extra_body=extra)
    response = [chunk.model_dump() for chunk in answer] if name in STREAMS else answer.model_dump()
    return {"request": {**body, **extra}, "response": response}


@pytest.mark.parametrize("plain", [False, True], ids=["speculating", "plain"])
@pytest.mark.parametrize("name", BODIES)
def test_a_saved_chat_is_reproduced(
    name: str, plain: bool, saved: dict[str, dict[str, Any]], fresh: Callable[[], Service], tmp_path: Path
) -> None:
    same, lines = said(fresh(), write(tmp_path, saved[name]), plain=plain)
    assert same, lines
    told = [line for line in lines if line.startswith("choice ")]
    assert len(told) == BODIES[name].get("n", 1)
    assert all("message" in line for line in told)
    if "calls" in name:
        record = read_record(write(tmp_path, saved[name]))
        assert isinstance(record, SavedPair)
        assert record.answer.outputs[0]["message"]["tool_calls"]


@pytest.mark.parametrize("name", ["calls", "streamed calls"])
def test_what_the_openai_client_makes_of_an_answer_is_a_record_as_well(
    name: str, saved: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    clean = read_record(write(tmp_path, saved[name]))
    same, lines = judged(clean, read_record(write(tmp_path, saved[f"openai: {name}"])))
    assert same, lines


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        ("calls", lambda response: _arguments_of(response, "{}"), "the ids are the same, but message.tool_calls[0]"),
        ("everything", lambda response: _content_of(response, "x"), "the ids are the same, but message.content is "),
        ("everything", lambda response: _other_id_of(response), "choice 0: output token 0 is "),
    ],
)
def test_another_answer_is_told(
    name: str,
    change: Callable[[dict[str, Any]], object],
    line: str,
    saved: dict[str, dict[str, Any]],
    fresh: Callable[[], Service],
    tmp_path: Path,
) -> None:
    pair = json.loads(json.dumps(saved[name]))
    change(pair["response"])
    same, lines = said(fresh(), write(tmp_path, pair))
    assert not same
    assert any(line in one for one in lines), lines


def _arguments_of(response: dict[str, Any], text: str) -> None:
    response["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] = text


def _content_of(response: dict[str, Any], text: str) -> None:
    response["choices"][0]["message"]["content"] = text


def _other_id_of(response: dict[str, Any]) -> None:
    response["choices"][0]["token_ids"][0] += 1


# Of these nothing is promised: an edited seed or model is another request, and ids of calls are drawn anew.
FREE = {"id", "object", "created", "metrics", "prompt_tokens_details", "system_fingerprint", "seed", "model"}


@pytest.mark.parametrize("name", ["everything", "calls", "streamed calls", "streamed token by token"])
def test_an_edit_at_any_place_of_the_answer_is_found(
    name: str, saved: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    pair = saved[name]
    clean = read_record(write(tmp_path, pair))
    looked_at: set[str] = set()
    for path in places(pair["response"]):
        keys = {step for step in path if isinstance(step, str)}
        if keys & FREE or keys == {"choices", "index"}:
            continue
        if "usage" in keys and isinstance(pair["response"], list) and path[0] != len(pair["response"]) - 1:
            continue  # of a stream's usage the last is compared
        try:
            record = read_record(write(tmp_path, edited(pair, ("response", *path))))
        except CommandError:
            continue  # found as well: the record contradicts itself
        same, lines = judged(clean, record)
        assert not same, (path, lines)
        looked_at |= keys
    assert looked_at >= {"finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "role"}
    assert looked_at >= ({"arguments", "name", "completion_tokens"} if "calls" in name else {"logprob", "bytes"})


def stream(*deltas: object) -> dict[str, Any]:
    """A record of one choice in several chunks."""
    chunks = [{"model": "m", "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    return {"request": {"model": "m", "seed": 1, "messages": ASK}, "response": chunks}


def calls(*deltas: object) -> dict[str, Any]:
    return stream({"role": "assistant", "content": ""}, *({"tool_calls": [delta]} for delta in deltas))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (stream(None), "wrong one: delta"),
        (stream({"role": "assistant"}, {"role": "assistant"}), "or has it twice: role"),
        (stream({"content": 3}), "or has it twice: content"),
        (stream({"tool_calls": 3}), "or has it twice: tool_calls"),
        (calls(3), "or has it twice: tool_calls"),
        (calls({"index": True, "function": {}}), "or has it twice: tool_calls"),
        (calls({"index": 0}), "or has it twice: tool_calls"),
        (calls({"index": 1, "function": {"name": "f"}}), "are not numbered from 0 on"),
        (stream({"role": "assistant"}) | {"response": {"model": "m", "choices": [{"index": 0, "text": "a"}]}},
         "wrong one: delta"),
        (stream({}) | {"response": [{"model": "m", "choices": [{"index": 0, "message": {}}]}] * 2},
         "is there several times"),
        (stream({}) | {"response": {"model": "m", "choices": [{"index": 0, "message": {"tool_calls": [3]}}]}},
         "wrong one: message.tool_calls"),
        (stream({}) | {"response": [{"model": "m", "choices": [{"index": 0, "delta": {}, "token_ids": 3}]}]},
         "wrong one: token_ids"),
        (stream({}) | {"response": [{"model": "m", "choices": [{"index": 0, "delta": {}, "logprobs": {"a": []}}]}]},
         "logprobs of a chat's stream"),
    ],
)  # fmt: skip
def test_a_bad_record_is_refused_in_one_line(record: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=why) as refused:
        read_record(write(tmp_path, record))
    assert "\n" not in str(refused.value)
