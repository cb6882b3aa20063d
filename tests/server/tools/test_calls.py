"""Tool calls on a real server with a tiny random model, through the real openai client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from server.tools.formats import ToolFormat
from tests.server.builders import MODEL_NAME, sse_events
from tests.server.chat_builders import joined_chat
from tests.server.tool_builders import TOOLS, arguments_are_valid
from tests.server.tools.asking import ASK, GET_WEATHER, IDS, PLAIN, answer, post, without_ids


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


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "json"], indirect=True)
def test_token_by_token_a_chunk_may_begin_a_call_and_go_on_with_it(http: httpx.Client, tool_format: ToolFormat) -> None:
    wanted = {"tool_choice": "required", "return_token_ids": True, "max_completion_tokens": 90}
    whole = answer(http, **wanted)
    options = {"one_token_per_chunk": True}
    events: list[Any] = sse_events(post(http, stream=True, stream_options=options, **wanted).content)
    assert len(events) - 1 == whole["usage"]["completion_tokens"]
    assert without_ids(joined_chat(events)) == without_ids(whole["choices"])


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
