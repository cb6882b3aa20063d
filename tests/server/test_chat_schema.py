"""Every field of a chat is honoured or refused by name: what is refused, and where the error says that it is."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from server.chat.messages import MAX_CALLS, MAX_MESSAGES, MAX_NAME
from server.chat.schema import CHAT_NOT_SUPPORTED, OF_TEMPLATES, ChatRequest, parse_chat
from server.errors import APIError
from server.schemas import GenerationRequest

USER = {"role": "user", "content": "hi"}


def call(**change: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **change}


def called(arguments: object) -> dict[str, Any]:
    return call(function={"name": "f", "arguments": arguments})


def assistant(**change: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "hi", **change}


def parts(*items: object) -> dict[str, Any]:
    return {"role": "user", "content": list(items)}


TEXT = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
FUNCTION = "messages[0].tool_calls[0].function"

BAD_MESSAGES: list[tuple[Any, str]] = [
    *((value, "messages") for value in ("hi", {}, [], 1, True, [USER] * (MAX_MESSAGES + 1))),
    *(([USER, value], "messages[1]") for value in ("hi", None, [], 1)),
    *(([{**USER, "role": value}], "messages[0].role") for value in (None, "", "function", "User", 1, ["user"], {})),
    *(([{"role": role}], "messages[0].content") for role in ("system", "developer", "user", "tool", "assistant")),
    ([{"role": "user", "content": None}], "messages[0].content"),
    *(([USER, {**USER, "content": value}], "messages[1].content") for value in (1, True, {}, [], [1], ["hi"], TEXT)),
    *(([parts(TEXT, value)], "messages[0].content") for value in (IMAGE, AUDIO, {"type": "refusal", "refusal": "no"})),
    *(([parts(value)], "messages[0].content") for value in ({**TEXT, "x": 1}, {"type": "text"}, {**TEXT, "text": 1})),
    ([parts(*[TEXT] * 1025)], "messages[0].content"),
    *(([{**USER, "name": value}], "messages[0].name") for value in (1, "", "x" * (MAX_NAME + 1), [])),
    *(([{**USER, name: "x"}], f"messages[0].{name}") for name in ("tool_calls", "tool_call_id", "audio", "weight")),
    ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    *(([{"role": "tool", "content": "x", "tool_call_id": v}], "messages[0].tool_call_id") for v in ("", 1, None)),
    *(([assistant(**{name: "x"})], f"messages[0].{name}") for name in ("refusal", "audio", "function_call", "prefix")),
    ([assistant(reasoning_content=1)], "messages[0].reasoning_content"),
    ([assistant(annotations=[{}])], "messages[0].annotations"),
    *(([assistant(tool_calls=v)], "messages[0].tool_calls") for v in ([], {}, "x", [call()] * (MAX_CALLS + 1))),
    *(([assistant(tool_calls=[v])], "messages[0].tool_calls[0]") for v in (1, "x", [])),
    ([assistant(tool_calls=[call(), call(id=None)])], "messages[0].tool_calls[1].id"),
    *(([assistant(tool_calls=[call(**{n: v})])], f"messages[0].tool_calls[0].{n}") for n, v in (
        ("id", ""), ("id", 1), ("type", "custom"), ("type", 1), ("function", "f"), ("index", "0"), ("x", 1),
    )),
    *(([assistant(tool_calls=[call(function=v)])], f"{FUNCTION}.name") for v in ({}, {"name": 1}, {"name": ""})),
    ([assistant(tool_calls=[call(function={"name": "f", "x": 1})])], f"{FUNCTION}.x"),
    *(
        ([assistant(tool_calls=[called(value)])], f"{FUNCTION}.arguments")
        for value in ({}, 1, "x", "[]", "1", '{"a":1}}', '{"a":NaN}', '{"a":1e999}', '{"a":1,"a":2}', "{" * 10**5,
                      '{"a":' + "[" * 100 + "]" * 100 + "}", '{"a":"\\ud800"}')
    ),
]  # fmt: skip

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"messages": messages}, param) for messages, param in BAD_MESSAGES),
    ({"messages": None}, "messages"),
    *(({name: value}, name) for name in ("max_tokens", "max_completion_tokens") for value in (0, -1, 1.5, "5", True)),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    *(({"logprobs": value}, "logprobs") for value in (0, 1, 5, "true")),
    *(({"logprobs": True, "top_logprobs": value}, "top_logprobs") for value in (-1, 21, True, "1")),
    *(({"top_logprobs": 2, **logprobs}, "top_logprobs") for logprobs in ({}, {"logprobs": False})),
    *(({"modalities": value}, "modalities") for value in ([], "text", ["audio"], ["text", "audio"], ["text", "text"])),
    *(({name: 1}, name) for name in CHAT_NOT_SUPPORTED),
    *(({name: value}, name) for name in OF_TEMPLATES for value in (True, None)),
    *(({name: 1}, name) for name in ("prompt", "best_of", "echo", "suffix", "nonsense")),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"temperature": 3}, "temperature"),
    ({"stop": [""]}, "stop"),
    ({"store": True}, "store"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        parse_chat({"model": "m", "messages": [USER], **change})
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message
    assert len(caught.value.message) < 500
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({}, "messages must be a list; it is an object of 0"),
        ([[]], "messages[0] must be an object; it is a list of 0"),
        *(
            ([assistant(tool_calls=[called(value)])], f"{FUNCTION}.arguments must be a JSON object; it {reason}")
            for value, reason in (
                ("[]", "is another JSON value"),
                ("3", "is another JSON value"),
                ('{"a": 1, "a": 2}', "holds the name 'a' twice in one object"),
                ('{"a": NaN}', "holds NaN, which is not JSON"),
                ("{} {}", "is not valid JSON: Extra data (line 1, column 4)"),
            )
        ),
        ([assistant(tool_calls=[called({})])], f"{FUNCTION}.arguments must be a string; it is an object of 0"),
    ],
)
def test_messages_say_what_is_wrong(messages: object, message: str) -> None:
    with pytest.raises(APIError) as caught:
        parse_chat({"model": "m", "messages": messages})
    assert caught.value.message == message


def test_a_null_stands_for_the_default() -> None:
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - {"model", "messages"})
    assert parse_chat({"model": "m", "messages": [USER], **nulls}) == parse_chat({"model": "m", "messages": [USER]})


def test_a_chat_takes_every_field_that_completions_share() -> None:
    assert set(GenerationRequest.model_fields) <= set(ChatRequest.model_fields)


def test_fields_that_are_inert_are_accepted() -> None:
    inert = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "include_obfuscation": False,
        "modalities": ["text"],
    }
    request = parse_chat({"model": "m", "messages": [USER], **inert})
    assert request.messages == ({"role": "user", "content": "hi"},)


def test_messages_become_what_templates_are_written_for() -> None:
    messages = [
        {"role": "developer", "content": [TEXT, TEXT]},
        assistant(content=None, tool_calls=[called('{"a": {"b": [1, null]}}')], refusal=None, audio=None),
        assistant(reasoning_content="because", name=None),
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "f"},
    ]
    function = {"name": "f", "arguments": {"a": {"b": [1, None]}}}
    assert parse_chat({"model": "m", "messages": messages}).messages == (
        {"role": "developer", "content": "hi\nhi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "assistant", "content": "hi", "reasoning_content": "because"},
        {"role": "tool", "content": "", "tool_call_id": "c1", "name": "f"},
    )


NULLS: list[dict[str, Any]] = [
    {"messages": [{"role": "assistant", "content": "x", "name": None, "tool_calls": None, "reasoning_content": None}]},
    {
        "messages": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "type": None, "function": {"name": "f", "arguments": None}}],
            }
        ]
    },
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "description": None, "schema": {}, "strict": None},
        }
    },
    {"structured_outputs": {"regex": "a", "json": None, "choice": None, "grammar": None, "json_object": False}},
    {"structured_outputs": {"json_object": True, "regex": None}},
    {
        "tools": [
            {"type": "function", "function": {"name": "f", "description": None, "parameters": None, "strict": None}}
        ]
    },
]


@pytest.mark.parametrize("fields", NULLS, ids=str)
def test_the_description_allows_the_nulls_that_are_taken(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    parse_chat(body)
    jsonschema.Draft202012Validator(ChatRequest.model_json_schema()).validate(body)
