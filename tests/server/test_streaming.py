"""Streams: the raw bytes, and that their pieces are the whole answer."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from server.service import Service
from server.sse import dump_json
from tests.server.builders import MODEL_NAME, joined, sse_events

PROMPT = "今天天气 the quick brown"


def stream(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL_NAME, "prompt": PROMPT, "stream": True, **body}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return sse_events(response.content)


def whole(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": PROMPT, **body}).json()
    return answer


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": 0, "prompt": "0 1 2 0 1 2 0 1 2"},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"echo": True},
        {"echo": True, "max_tokens": 0, "logprobs": 0},
        {"max_tokens": 0},
        {"stop": ["e", "the", "\ufffd"]},
        {"stop": ["e", "o"], "include_stop_str_in_output": True, "logprobs": 0},
        {"n": 3},
        {"prompt": ["a", "b c", "好"], "n": 2, "logprobs": 0},
        {"logit_bias": {"0": 100}, "min_tokens": 4},
        {"allowed_token_ids": [70, 71, 72], "temperature": 0},
    ],
    ids=str,
)
def test_the_pieces_of_a_stream_are_the_whole_answer(http: httpx.Client, change: dict[str, Any]) -> None:
    body = {"max_tokens": 40, "seed": 17, "return_token_ids": True, **change}
    chunks = stream(http, **body)
    assert joined(chunks) == whole(http, **body)["choices"]
    ends = [piece["finish_reason"] for chunk in chunks for piece in chunk["choices"] if piece["finish_reason"]]
    assert len(ends) == len(joined(chunks))


def test_every_chunk_carries_the_same_head(http: httpx.Client) -> None:
    chunks = stream(http, max_tokens=5, seed=1)
    heads = {(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}
    assert len(heads) == 1
    assert next(iter(heads))[1] == "text_completion"
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.case("sparkDash 105")
def test_the_usage_chunk_comes_last_with_seed_and_metrics(http: httpx.Client) -> None:
    body = {"max_tokens": 12, "seed": 2, "ignore_eos": True}
    *chunks, last = stream(http, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert last["usage"]["total_tokens"] == whole(http, **body)["usage"]["total_tokens"]
    assert last["seed"] == 2
    assert last["metrics"]["tokens_per_second"] > 0


@pytest.mark.case("llama-benchy 11")
def test_continuous_usage_counts_up_to_the_end(http: httpx.Client) -> None:
    chunks = stream(http, max_tokens=12, seed=2, stream_options={"continuous_usage_stats": True}, return_token_ids=True)
    counted = 0
    for chunk in chunks:
        counted += len(chunk["choices"][0]["token_ids"])
        assert chunk["usage"]["completion_tokens"] == counted


def test_the_openai_client_reads_the_stream(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        events = list(
            client.completions.create(
                model=MODEL_NAME,
                prompt=PROMPT,
                max_tokens=9,
                seed=3,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=9, seed=3)
    assert "".join(event.choices[0].text for event in events if event.choices) == answer.choices[0].text
    assert events[-1].usage.completion_tokens == answer.usage.completion_tokens


def test_headers_of_a_stream(http: httpx.Client) -> None:
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 2, "stream": True}
    response = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-request-id"] == "mine"
    assert int(response.headers["x-seed"]) >= 0


def test_errors_before_the_stream_are_no_stream(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "", "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # What is left after the first "a": nothing, as "aa" must not appear.
        ({"prompt": "a", "allowed_token_ids": "a", "bad_words": "aa"}, "bad_words"),
        ({"repetition_penalty": 1e-320, "temperature": 0}, "repetition_penalty"),
    ],
    ids=str,
)
def test_parameters_that_turn_out_impossible_are_the_clients_error_in_a_stream_and_without(
    http: httpx.Client, service: Service, change: dict[str, Any], words: str
) -> None:
    change = dict(change)
    if "allowed_token_ids" in change:
        change["allowed_token_ids"] = service.tokenizer.encode_many([change["allowed_token_ids"]])[0]
    body = {"prompt": PROMPT, "max_tokens": 5, "seed": 1, **change}
    chunks = stream(http, **body)
    error = chunks[-1]["error"]
    assert set(chunks[-1]) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    response = http.post("/v1/completions", json={"model": MODEL_NAME, **body})
    assert response.status_code == 400
    assert response.json()["error"] == error
    assert whole(http, max_tokens=2)["choices"], "others go on"


def test_no_character_that_a_client_takes_for_a_line_end_is_sent_bare() -> None:
    text = "a\u2028b\u2029c\x85d\x7fe\n\rf😀"
    raw = dump_json({"text": text})
    assert httpx.Response(200, content=raw).json() == {"text": text}
    assert len(raw.decode().splitlines()) == 1


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 9}], ids=str)
@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 4])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_across_token_borders_is_found_wherever_it_lies(
    http: httpx.Client, streamed: bool, num_speculative_tokens: int, sampling: dict[str, Any], include: bool
) -> None:
    # The prompt repeats itself, so that drafts are accepted and a stop string ends in the middle of an accepted run.
    body = {"prompt": "0 1 2 0 1 2 0 1 2", "max_tokens": 24, "ignore_eos": True, "return_token_ids": True, **sampling}
    unstopped = whole(http, **body, logprobs=0, speculation={"num_speculative_tokens": 0})["choices"][0]
    text, offsets = unstopped["text"], unstopped["logprobs"]["text_offset"]
    checked = 0
    for i in range(1, len(offsets) - 1):
        border = offsets[i] - offsets[0]
        end = offsets[i + 1] - offsets[0]
        stop = text[border - 1 : border + 1]  # the last character of one token and the first of the next
        # Only where it first occurs at this very border, so the end is known; a part of a character is no text.
        if border == 0 or end == border or "\ufffd" in stop or text.find(stop) != border - 1:
            continue
        asked = {
            **body,
            "stop": ["never in any text", stop],
            "include_stop_str_in_output": include,
            "speculation": {"num_speculative_tokens": num_speculative_tokens},
        }
        (choice,) = joined(stream(http, **asked)) if streamed else whole(http, **asked)["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["text"] == text[: border + 1 if include else border - 1]
        assert choice["token_ids"] == unstopped["token_ids"][: i + 1]
        checked += 1
        if checked == 6:
            break
    assert checked >= 3
