"""Tool calls on a real server with a tiny random model, through the real openai client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.service import Service
from server.tools.formats import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from server.tools.plan import ToolSupport
from tests.server.builders import MODEL_NAME, build_service, running, sse_events
from tests.server.chat_builders import joined_chat
from tests.server.tool_builders import (
    ADD,
    NO_TOOLS_TEMPLATE,
    NOW,
    TEMPLATE,
    TOOLS,
    WEATHER,
    added_tokens,
    arguments_are_valid,
    function,
    save_tool_model,
    tool_tokenizer,
)

ASK = [{"role": "user", "content": "the quick brown fox"}]
TOKENIZER = tool_tokenizer()
IDS = {text: token_id for token_id, text in TOKENIZER.added_tokens.items()}
FORMATS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral args": MISTRAL_ARGS, "json": JSON}
GET_WEATHER = {"type": "function", "function": {"name": "get_weather"}}
PLAIN = {"num_speculative_tokens": 0}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Service:
    return build_service(save_tool_model(tmp_path_factory.mktemp("tools") / "model", "hermes"), model_home)


@pytest.fixture(scope="module")
def base(service: Service) -> Iterator[str]:
    with running(service) as url:
        yield url


@pytest.fixture(scope="module")
def http(base: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(params=FORMATS)
def tool_format(request: pytest.FixtureRequest, service: Service) -> Iterator[ToolFormat]:
    """The server, as if its model wrote calls so."""
    yield from use(service, FORMATS[request.param], TEMPLATE)


def use(service: Service, tool_format: ToolFormat, template: str) -> Iterator[ToolFormat]:
    found = service.tools
    service.tools = ToolSupport(tool_format, added_tokens(TOKENIZER), template)
    yield tool_format
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


def test_required_calls_are_valid_and_the_openai_client_reads_them(
    client: openai.OpenAI, tool_format: ToolFormat
) -> None:
    for seed in range(2):
        found = client.chat.completions.create(
            model=MODEL_NAME,
            messages=ASK,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            seed=seed,
            max_completion_tokens=200,
        )
        (choice,) = found.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert arguments_are_valid(call.function.name, call.function.arguments), call


@pytest.mark.parametrize("tool_format", ["hermes", "mistral"], indirect=True)
@pytest.mark.parametrize("tool_choice", ["required", "auto"])
def test_streamed_calls_join_to_the_whole_answer(http: httpx.Client, tool_format: ToolFormat, tool_choice: str) -> None:
    wanted = {"tool_choice": tool_choice, "logprobs": True, "return_token_ids": True, "max_completion_tokens": 45}
    whole = answer(http, **wanted)
    chunks: list[Any] = sse_events(post(http, stream=True, **wanted).content)
    assert without_ids(joined_chat(chunks)) == without_ids(whole["choices"])


def test_deltas_come_as_clients_join_them(http: httpx.Client) -> None:
    events: list[Any] = sse_events(post(http, stream=True, tool_choice=GET_WEATHER).content)
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    first, start, *pieces = deltas
    assert first == {"role": "assistant", "content": ""}
    (call,) = start["tool_calls"]
    assert call.keys() == {"index", "id", "type", "function"}
    assert call["id"].startswith("call_")
    assert (call["index"], call["type"], call["function"]["arguments"]) == (0, "function", "")
    given = [delta["tool_calls"][0] for delta in pieces if delta]
    assert len(given) > 1
    assert all(piece.keys() == {"index", "function"} and piece["function"].keys() == {"arguments"} for piece in given)
    assert [event["choices"][0]["finish_reason"] for event in events].count("tool_calls") == 1


def test_the_async_client_streams_calls(base: str) -> None:
    async def run() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none") as client:
            names, arguments, ends = [], [], []
            async for chunk in await client.chat.completions.create(
                model=MODEL_NAME, messages=ASK, tools=TOOLS, tool_choice="required", seed=5, stream=True,
                parallel_tool_calls=False, max_completion_tokens=200,
            ):  # fmt: skip
                for call in chunk.choices[0].delta.tool_calls or []:
                    names.append(call.function.name or "")
                    arguments.append(call.function.arguments)
                ends.append(chunk.choices[0].finish_reason or "")
            return "".join(names), "".join(arguments), "".join(ends)

    name, arguments, end = asyncio.run(run())
    assert end == "tool_calls"
    assert arguments_are_valid(name, arguments)


OPENINGS = {str(IDS[opening]): 8 for opening in ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")}


@pytest.mark.parametrize(
    ("tool_format", "change"),
    [
        ("hermes", {"tool_choice": "required", "temperature": 1.3, "n": 2}),
        ("hermes", {"tool_choice": "auto", "logit_bias": OPENINGS}),
        ("llama3", {"tool_choice": GET_WEATHER, "frequency_penalty": 0.7, "temperature": 0}),
        ("llama3", {"tool_choice": "auto", "logit_bias": OPENINGS}),
        ("mistral", {"tool_choice": "auto", "logit_bias": OPENINGS}),
        ("mistral args", {"tool_choice": "required", "repetition_penalty": 1.3}),
        ("json", {"tool_choice": "required", "temperature": 0.5}),
    ],
    indirect=["tool_format"],
)
def test_speculation_changes_nothing(http: httpx.Client, tool_format: ToolFormat, change: dict[str, Any]) -> None:
    wanted = {**change, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "max_completion_tokens": 40}
    on, off = answer(http, **wanted), answer(http, **wanted, speculation=PLAIN)
    assert without_ids(on["choices"]) == without_ids(off["choices"])
    for counts in (on["usage"], off["usage"]):
        counts.pop("prompt_tokens_details")
    assert on["usage"] == off["usage"]


def test_what_a_call_must_say_is_drafted(http: httpx.Client) -> None:
    found = answer(http, tool_choice="required", parallel_tool_calls=False)
    assert found["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 10


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
    for _ in use(service, MISTRAL, TEMPLATE):
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
    for _ in use(service, MISTRAL, TEMPLATE):
        wanted = {"logit_bias": {str(IDS["[TOOL_CALLS]"]): 100}, "parallel_tool_calls": False}
        found = answer(http, **wanted)["choices"][0]
        assert found["message"]["content"] is None
        assert len(calls_of(found)) == 1
        cut = answer(http, **wanted, max_completion_tokens=3)["choices"][0]
        assert "[TOOL_CALLS]" not in cut["message"]["content"]
        shown = answer(http, **wanted, max_completion_tokens=3, skip_special_tokens=False)["choices"][0]
        assert shown["message"]["content"].startswith("[TOOL_CALLS]")


def test_a_conversation_goes_on_with_the_results_of_calls(http: httpx.Client) -> None:
    message = answer(http, tool_choice="required", parallel_tool_calls=False)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "</tool_call><|im_end|>sunny"}
    found = answer(http, messages=[*ASK, message, result], return_token_ids=True, max_completion_tokens=1)["choices"][0]
    prompt = TOKENIZER.decode(found["prompt_token_ids"], False)
    assert call["id"] in prompt
    assert (
        json.dumps({"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}) in prompt
    )
    assert "<|im_end|>sunny" in prompt
    assert found["prompt_token_ids"].count(IDS["<|im_end|>"]) == 3  # of the template, none of the result
    assert IDS["</tool_call>"] not in found["prompt_token_ids"]


def test_a_template_that_knows_no_tools_is_helped_out_in_words(http: httpx.Client, service: Service) -> None:
    for _ in use(service, JSON, NO_TOOLS_TEMPLATE):
        first = answer(http, tool_choice="required", parallel_tool_calls=False, return_token_ids=True)["choices"][0]
        prompt = TOKENIZER.decode(first["prompt_token_ids"], False)
        assert json.dumps(WEATHER["function"]) in prompt
        assert '{"name": "<name>", "arguments": {"<argument>": "<value>"}}' in prompt
        (call,) = first["message"]["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        found = answer(http, messages=[*ASK, first["message"], result], return_token_ids=True, max_completion_tokens=1)[
            "choices"
        ][0]
        prompt = TOKENIZER.decode(found["prompt_token_ids"], False)
        assert f'assistant\n{{"name": "{call["function"]["name"]}"' in prompt
        assert f"user\nResult of {call['function']['name']}: sunny" in prompt


def test_an_answer_in_a_schema_or_calls(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    opening = str(IDS["<tool_call>"])
    called = answer(http, response_format=wanted, logit_bias={opening: 100}, parallel_tool_calls=False)["choices"][0]
    assert len(calls_of(called)) == 1
    told = answer(http, response_format=wanted, logit_bias={opening: -100})["choices"][0]
    assert json.loads(told["message"]["content"])["x"] in (1, 2)
    assert (told["finish_reason"], calls_of(told)) == ("stop", [])


def test_output_formats_that_calls_cannot_keep_to_are_refused(http: httpx.Client, service: Service) -> None:
    for tool_choice in ("auto", "required"):
        error = post(http, tool_choice=tool_choice, structured_outputs={"regex": "a+"}).json()["error"]
        assert error["param"] == "structured_outputs.regex"
    assert post(http, tool_choice="none", structured_outputs={"regex": "a"}).status_code == 200
    for _ in use(service, JSON, TEMPLATE):
        error = post(http, response_format={"type": "json_object"}).json()["error"]
        assert error["param"] == "response_format"
        assert post(
            http, response_format={"type": "json_object"}, tool_choice="required", max_completion_tokens=1
        ).is_success


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


def test_a_template_that_shows_one_call_gets_one(http: httpx.Client, service: Service) -> None:
    for _ in use(service, LLAMA3, TEMPLATE + "{# only supports single tool-calls at once #}"):
        found = answer(http, tool_choice="required", max_completion_tokens=400)["choices"][0]
        assert (found["finish_reason"], len(calls_of(found))) == ("tool_calls", 1)


def test_the_server_says_how_calls_are_written(http: httpx.Client) -> None:
    info = http.get("/v1/server_info").json()
    assert info["tool_calls"] == {"format": "hermes", "template_shows_tools": True}


BIG = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 1000} for i in range(60)}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("a\n")]}, "tools[0].function.name"),
        ({"tools": [function("é")]}, "tools[0].function.name"),
        ({"tools": [function("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [function("f", description=3)]}, "tools[0].function.description"),
        ({"tools": [function("f", description="x" * 16385)]}, "tools[0].function.description"),
        ({"tools": [function("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function("f", color="red")]}, "tools[0].function.color"),
        ({"tools": [function("f", parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [function("f", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [function("f", {"description": "x" * 70_000})]}, "tools[0].function.parameters"),
        ({"tools": [function(f"f{i}", BIG) for i in range(3)]}, "tools"),
        ({"tools": [function("f", {"properties": {"a": {"type": "text"}}})]}, "tools"),
        ({"tools": [function("f", {"properties": {"a": {"type": "string", "pattern": "("}}})]}, "tools"),
        ({"tools": [function("f", {"properties": {"a": {"not": {}}}}, strict=True)]}, "tools"),
        ({"tools": ..., "tool_choice": "auto"}, "tool_choice"),
        ({"tools": ..., "tool_choice": "required"}, "tool_choice"),
        ({"tools": ..., "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothere"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "function": {"name": 3}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
         "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused_by_name(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = post(http, **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
