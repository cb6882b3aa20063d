"""``one_token_per_chunk``: every token has a chunk of its own, and the chunks are still the whole answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.request import ChoiceEvent
from server.detokenize import ChoiceText
from server.one_token import TokenByToken
from server.tools.deltas import Arguments, CallStart, Content, Delta, JoinedDeltas, merged_body
from specdec.plan import TokenLogprobs
from tests.server.builders import MODEL_NAME, byte_level_tokenizer, joined, sse_events
from tests.server.chat_builders import HELLO, joined_chat

REPEATING = "0 1 2 0 1 2 0 1 2"  # drafts are accepted: a step brings several tokens
ONE = {"one_token_per_chunk": True, "include_usage": True, "continuous_usage_stats": True}
TOKENIZER = byte_level_tokenizer()


def post(http: httpx.Client, path: str, **body: Any) -> httpx.Response:
    response = http.post(
        path, json={"model": MODEL_NAME, "max_tokens": 40, "seed": 17, "return_token_ids": True, **body}
    )
    assert response.status_code == 200, response.text
    return response


def chunks_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = sse_events(post(http, path, stream=True, **body).content)
    return events


@pytest.mark.case("llama-benchy 11")
@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0, "prompt": REPEATING, "ignore_eos": True},
        {"logprobs": 2, "echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 0},
        {"stop": ["2 0", "\ufffd"], "temperature": 0, "logprobs": 0},
        {"stop": ["1 2"], "include_stop_str_in_output": True, "temperature": 0},
        {"prompt": ["0 1 2 0 1 2", "a a a a a"], "n": 2},
        {"speculation": {"num_speculative_tokens": 0}},
    ],
    ids=str,
)
def test_each_token_has_a_chunk_and_they_join_to_the_whole_answer(http: httpx.Client, change: dict[str, Any]) -> None:
    body = {"prompt": REPEATING, **change}
    answer = post(http, "/v1/completions", **body).json()
    *chunks, last = chunks_of(http, "/v1/completions", **body, stream_options=ONE)
    assert joined(chunks) == answer["choices"]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    if body.get("max_tokens") != 0:
        assert all(len(chunk["choices"][0]["token_ids"]) == 1 for chunk in chunks)
        assert len(chunks) == answer["usage"]["completion_tokens"]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == list(range(1, len(chunks) + 1))
    assert last["usage"] | {"prompt_tokens_details": None} == answer["usage"] | {"prompt_tokens_details": None}


def test_without_the_option_a_chunk_has_what_its_step_brought(http: httpx.Client) -> None:
    chunks = chunks_of(http, "/v1/completions", prompt=REPEATING, temperature=0, ignore_eos=True)
    assert max(len(chunk["choices"][0]["token_ids"]) for chunk in chunks) > 1


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0, "messages": [{"role": "user", "content": REPEATING}], "ignore_eos": True},
        {"n": 2, "logprobs": True, "top_logprobs": 1},
        {"stop": ["e", "o"], "temperature": 0},
    ],
    ids=str,
)
def test_each_token_of_a_chat_has_a_chunk_behind_the_first(chat_http: httpx.Client, change: dict[str, Any]) -> None:
    body = {"messages": HELLO, **change}
    answer = post(chat_http, "/v1/chat/completions", **body).json()
    *chunks, _ = chunks_of(chat_http, "/v1/chat/completions", **body, stream_options=ONE)
    assert joined_chat(chunks) == answer["choices"]
    told = [chunk for chunk in chunks if "role" not in chunk["choices"][0]["delta"]]
    assert len(chunks) - len(told) == len(answer["choices"])
    assert all(len(chunk["choices"][0]["token_ids"]) == 1 for chunk in told)
    assert len(told) == answer["usage"]["completion_tokens"]


def test_a_chat_has_a_chunk_for_each_token_also_where_nobody_asks_for_ids(chat_http: httpx.Client) -> None:
    body = {"messages": HELLO, "return_token_ids": False, "ignore_eos": True, "max_tokens": 30}
    chunks = chunks_of(chat_http, "/v1/chat/completions", **body, stream_options={"one_token_per_chunk": True})
    assert len(chunks) == 1 + 30


def test_the_openai_client_counts_tokens_by_chunks(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        stream = client.completions.create(
            model=MODEL_NAME, prompt=REPEATING, temperature=0, max_tokens=24, stream=True, stream_options=ONE,
        )  # fmt: skip
        *chunks, last = list(stream)
    assert last.usage is not None
    assert len(chunks) == last.usage.completion_tokens


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=24),
    st.lists(st.integers(1, 6), min_size=24, max_size=24),
    st.lists(st.sampled_from(["e", "th", "0 1", "天", "\ufffd", " fox j", "😀"]), max_size=3),
    st.booleans(),
)
def test_split_events_join_to_the_events_and_no_text_comes_before_its_token(
    ids: list[int], sizes: list[int], stops: list[str], include: bool
) -> None:
    """Whatever the tokens are, however steps cut them, and whatever a stop string holds back."""
    text, splitter = ChoiceText(TOKENIZER, stop=stops, include_stop=include), TokenByToken()
    known = given_text = ""
    while ids:
        run, ids = ids[: sizes[0]], ids[sizes[0] :]
        sizes = sizes[1:]
        decision = text.push(run, not ids)
        kept = run[: decision.num_kept]
        logprobs = tuple(TokenLogprobs(token_id, -1.0, 1, ()) for token_id in kept)
        end = "stop" if decision.stopped else None if ids else "length"
        event = ChoiceEvent("r", 0, tuple(kept), decision.text, decision.token_texts, logprobs, finish_reason=end)
        parts = splitter.split(event)
        assert all(len(part.token_ids) <= 1 for part in parts)
        assert all(part.finish_reason is None for part in parts[:-1])
        whole = parts[0]
        for part in parts[1:]:
            assert part.logprobs is not None
            assert whole.logprobs is not None
            whole = replace(
                part,
                token_ids=whole.token_ids + part.token_ids,
                text=whole.text + part.text,
                token_texts=whole.token_texts + part.token_texts,
                logprobs=whole.logprobs + part.logprobs,
            )
        assert whole == event
        for part in parts[:-1]:
            known, given_text = known + "".join(part.token_texts), given_text + part.text
            assert known.startswith(given_text)
        known, given_text = known + "".join(parts[-1].token_texts), given_text + parts[-1].text
        if decision.stopped:
            break


def test_text_comes_with_the_token_that_completed_it() -> None:
    ids = tuple(TOKENIZER.encode("the quick brown fox"))
    pieces = [TOKENIZER.decode([token_id]) for token_id in ids]
    event = ChoiceEvent("r", 0, ids, "".join(pieces), tuple(pieces))
    assert [part.text for part in TokenByToken().split(event)] == pieces


@given(
    st.lists(st.one_of(st.builds(Content, st.text(max_size=3)), st.just(None), st.text("{}", max_size=3)), max_size=8)
)
def test_merged_deltas_join_to_what_they_join_to_one_by_one(steps: list[Content | str | None]) -> None:
    deltas: list[Delta] = []
    calls = 0
    for step in steps:
        if step is None:
            deltas.append(CallStart(calls, f"id{calls}", "f"))
            calls += 1
        elif isinstance(step, Content):
            deltas.append(step)
        elif calls:
            deltas.append(Arguments(calls - 1, step))
    alone = JoinedDeltas()
    alone.add(deltas)
    piece = {"index": 0, "finish_reason": None, "stop_reason": None, "logprobs": None}
    for cut in range(len(deltas) + 1):
        bodies = [{"role": "assistant", "content": ""}, merged_body(deltas[:cut]), merged_body(deltas[cut:])]
        (choice,) = joined_chat([{"choices": [{**piece, "delta": body}]} for body in bodies])
        message = choice["message"]
        assert (message["content"] or "") == alone.content
        assert message.get("tool_calls", []) == alone.tool_calls
