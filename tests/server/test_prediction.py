"""Predicted outputs on a real server: they are drafted, they are counted, and they never change an output."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from server.service import Service
from tests.server.builders import CONTEXT, EOS, MODEL_NAME, build_service, metric, running, sse_events

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # each is a token, whatever stands beside it
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def suffix_service(tiny_model: Path, model_home: Path) -> Service:
    """With a fixed draft length: what a controller picks follows from how long steps take."""
    return build_service(
        tiny_model, model_home, drafter="suffix", draft_length="fixed", num_speculative_tokens=4, audit_rate=1.0
    )


@pytest.fixture(scope="module")
def url(suffix_service: Service) -> Iterator[str]:
    with running(suffix_service) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def letters(suffix_service: Service) -> list[int]:
    ids = [suffix_service.tokenizer.encode(letter) for letter in LETTERS]
    assert all(len(piece) == 1 for piece in ids)
    assert suffix_service.tokenizer.encode(LETTERS) == [piece[0] for piece in ids]
    return [piece[0] for piece in ids]


def complete(client: openai.OpenAI, letters: list[int], prediction: Any = None, **body: Any) -> openai.types.Completion:
    """A text of letters that hardly repeats itself. Its own salt, so that no request drafts from another's output."""
    extra = {"allowed_token_ids": letters, "return_token_ids": True, "cache_salt": uuid.uuid4().hex, **body}
    if prediction is not None:
        extra["prediction"] = {"type": "content", "content": prediction}
    options = {name: extra.pop(name) for name in ("n", "prompt", "temperature", "echo", "logprobs") if name in extra}
    options = {"prompt": "the quick", **options}
    answer: openai.types.Completion = client.completions.create(
        model=MODEL_NAME, max_tokens=NUM_TOKENS, seed=4, extra_body=extra, **options
    )
    return answer


def details(answer: openai.types.Completion) -> tuple[int, int]:
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    found = answer.usage.completion_tokens_details
    assert found.accepted_prediction_tokens is not None
    assert found.rejected_prediction_tokens is not None
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


def test_a_right_prediction_is_drafted_and_counted(client: openai.OpenAI, letters: list[int]) -> None:
    plain = complete(client, letters)
    assert plain.usage is not None
    assert plain.usage.completion_tokens_details is None
    foreseen = complete(client, letters, plain.choices[0].text)
    accepted, rejected = details(foreseen)
    assert accepted > NUM_TOKENS // 2
    assert accepted + rejected == NUM_TOKENS
    assert foreseen.usage is not None
    # It counts nowhere else.
    assert foreseen.usage.prompt_tokens == plain.usage.prompt_tokens
    assert foreseen.usage.completion_tokens == plain.usage.completion_tokens
    assert foreseen.usage.total_tokens == plain.usage.total_tokens
    spec, without = (answer.metrics["speculative_decoding"] for answer in (foreseen, plain))  # type: ignore[attr-defined]
    assert spec["num_accepted_draft_tokens"] >= accepted > without["num_accepted_draft_tokens"]


def test_a_wrong_prediction_is_rejected_whole(
    suffix_service: Service, client: openai.OpenAI, letters: list[int]
) -> None:
    wrong = "0 1 2 3 4 5"
    count = len(suffix_service.tokenizer.encode(wrong))
    assert details(complete(client, letters, wrong)) == (0, count)
    assert details(complete(client, letters, "")) == (0, 0)


def test_parts_are_one_text(client: openai.OpenAI, letters: list[int]) -> None:
    text = complete(client, letters).choices[0].text
    parts = [{"type": "text", "text": text[:7]}, {"type": "text", "text": ""}, {"type": "text", "text": text[7:]}]
    answer = complete(client, letters, parts)
    assert sum(details(answer)) == NUM_TOKENS
    assert details(answer)[0] > NUM_TOKENS // 2


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0},
        {"temperature": 1, "logprobs": 2},
        {"temperature": 0.8, "frequency_penalty": 1.5, "stop": ["A"]},
        {"n": 3},
        {"prompt": ["the quick", "0 1 2"], "n": 2},
        {"echo": True, "logprobs": 0},
        {"best_of": 3, "n": 1},
        {"speculation": {"num_speculative_tokens": 0}},
    ],
    ids=str,
)
def test_no_prediction_changes_an_answer(client: openai.OpenAI, letters: list[int], change: dict[str, Any]) -> None:
    plain = complete(client, letters, **change)
    right = plain.choices[0].text
    adversarial = "".join(c + LETTERS[(LETTERS.find(c) + 1) % 26] for c in right) + EOS + right * 3
    for prediction in (right, "no such thing 😀" * 5, adversarial):
        answer = complete(client, letters, prediction, **change)
        assert answer.choices == plain.choices
        assert answer.usage is not None
        assert plain.usage is not None
        assert answer.usage.completion_tokens == plain.usage.completion_tokens
        if change.get("speculation"):
            assert details(answer)[0] == 0


def test_several_choices_count_the_prediction_each(client: openai.OpenAI, letters: list[int]) -> None:
    text = complete(client, letters).choices[0].text
    answer = complete(client, letters, text, n=3)
    accepted, rejected = details(answer)
    assert accepted + rejected == 3 * NUM_TOKENS
    assert NUM_TOKENS // 2 < accepted < 3 * NUM_TOKENS // 2  # the other two choices are others


def test_a_stream_counts_as_the_whole_answer_does(url: str, client: openai.OpenAI, letters: list[int]) -> None:
    text = complete(client, letters).choices[0].text
    body = {
        "model": MODEL_NAME,
        "prompt": "the quick",
        "max_tokens": NUM_TOKENS,
        "seed": 4,
        "allowed_token_ids": letters,
        "prediction": {"type": "content", "content": text},
        "cache_salt": "stream",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chunks: list[dict[str, Any]] = sse_events(httpx.post(f"{url}/v1/completions", json=body).content)
    counts = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
    accepted, rejected = counts[-1]["accepted_prediction_tokens"], counts[-1]["rejected_prediction_tokens"]
    assert accepted > NUM_TOKENS // 2
    assert accepted + rejected == NUM_TOKENS
    assert counts[0] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}  # known at the end
    assert "".join(piece["text"] for chunk in chunks for piece in chunk["choices"]) == text


@pytest.mark.parametrize("tokens", [CONTEXT + 1, 100 * CONTEXT])
def test_a_prediction_that_no_answer_could_hold_is_refused(
    client: openai.OpenAI, letters: list[int], tokens: int
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, letters, "A" * tokens)
    assert caught.value.param == "prediction"
    assert str(CONTEXT) in caught.value.message
    assert sum(details(complete(client, letters, "A" * CONTEXT))) == CONTEXT


@pytest.mark.parametrize("speculation", [{}, {"drafter": "ngram"}, {"num_speculative_tokens": 0}], ids=str)
def test_a_prediction_is_taken_whoever_drafts_and_however_far(http: httpx.Client, speculation: dict[str, Any]) -> None:
    """The server of the other tests: the best of all drafters, as far as it pays."""
    body = {"model": MODEL_NAME, "prompt": "0 1 2 0 1", "max_tokens": 24, "seed": 1, "return_token_ids": True}
    body |= {"speculation": speculation}
    plain = http.post("/v1/completions", json=body).json()
    predicted = {"type": "content", "content": plain["choices"][0]["text"]}
    answer = http.post("/v1/completions", json={**body, "prediction": predicted}).json()
    assert answer["choices"] == plain["choices"]
    details = answer["usage"]["completion_tokens_details"]
    if speculation.get("num_speculative_tokens") == 0:
        assert details["accepted_prediction_tokens"] == 0 < details["rejected_prediction_tokens"]


def test_audits_run_without_the_prediction_and_agree(url: str, client: openai.OpenAI, letters: list[int]) -> None:
    before = metric(url, "equivalence_audits_total", result="match")
    text = complete(client, letters).choices[0].text
    for _ in range(3):
        complete(client, letters, text)
    while metric(url, "equivalence_audits_total", result="match") < before + 4:
        assert metric(url, "equivalence_audits_total", result="mismatch") == 0
        time.sleep(0.01)
    assert metric(url, "equivalence_audits_total", result="match") >= before + 4
    assert metric(url, "equivalence_audits_total", result="mismatch") == 0
