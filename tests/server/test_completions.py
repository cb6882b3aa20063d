"""POST /v1/completions on a real server with a tiny random model, whole answers."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from server.service import Service
from tests.server.builders import CONTEXT, EOS, MODEL_NAME, metric

PROMPT = "the quick brown fox"


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": PROMPT, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def test_the_answer_has_the_shape_that_the_openai_client_reads(base: str) -> None:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none") as client:
        answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=7, temperature=0, user="u")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.model == MODEL_NAME
    assert answer.system_fingerprint.startswith("fp_")
    assert [choice.index for choice in answer.choices] == [0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_the_text_is_the_decode_of_the_ids(http: httpx.Client, service: Service) -> None:
    choice = complete(http, max_tokens=30, seed=5, return_token_ids=True)["choices"][0]
    assert choice["text"] == service.tokenizer.decode(choice["token_ids"])
    assert choice["prompt_token_ids"] == service.tokenizer.encode(PROMPT)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0},
        {"seed": 3},
        {"seed": 3, "temperature": 0.6, "top_p": 0.8, "top_k": 30, "min_p": 0.01},
        {"seed": 4, "frequency_penalty": 1.5, "presence_penalty": -1, "repetition_penalty": 1.2},
        {"seed": 5, "logit_bias": {"70": 5, "80": -100}, "min_tokens": 5, "bad_words": ["the", " o"]},
        {"temperature": 0, "allowed_token_ids": [70, 71, 72, 73]},
        {"seed": 6, "stop": ["e", "好"], "include_stop_str_in_output": True},
        {"seed": 7, "logprobs": 3, "n": 3},
    ],
    ids=str,
)
def test_speculation_on_and_off_give_the_same_answer(http: httpx.Client, change: dict[str, Any]) -> None:
    body = {"prompt": "0 1 2 0 1 2 0 1 2 0 1", "max_tokens": 40, "return_token_ids": True, **change}
    on = complete(http, **body)
    off = complete(http, **body, speculation={"num_speculative_tokens": 0})
    assert on["choices"] == off["choices"]
    assert off["metrics"] is None or off["metrics"]["speculative_decoding"] is None


def test_speculation_accepts_drafts_on_a_text_that_repeats(http: httpx.Client) -> None:
    answer = complete(
        http,
        max_tokens=60,
        temperature=0,
        allowed_token_ids=[70, 71, 72],
        ignore_eos=True,
        speculation={"num_speculative_tokens": 4},  # whether or not it pays
    )
    spec = answer["metrics"]["speculative_decoding"]
    assert spec["num_accepted_draft_tokens"] > 0
    histogram = spec["acceptance_histogram"]
    assert len(histogram) == spec["num_spec_tokens"] + 1
    assert sum(histogram) == spec["num_spec_steps"]
    assert sum(i * count for i, count in enumerate(histogram)) == spec["num_accepted_draft_tokens"]
    accepted, steps = spec["num_accepted_draft_tokens"], spec["num_spec_steps"]
    assert spec["mean_acceptance_length"] == pytest.approx(1 + accepted / steps, abs=1e-5)


@pytest.mark.case("V 6038")
def test_a_seed_replays_and_another_differs(http: httpx.Client) -> None:
    first, again, other = (complete(http, seed=seed, max_tokens=20, return_token_ids=True) for seed in (11, 11, 12))
    assert ids_of(first) == ids_of(again) != ids_of(other)


def test_a_request_without_a_seed_tells_the_one_it_used(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 20})
    seed = response.json()["seed"]
    assert response.headers["x-seed"] == str(seed)
    assert 0 <= seed < 2**53
    assert complete(http, seed=seed, max_tokens=20)["choices"] == response.json()["choices"]


def test_a_negative_seed_is_reported_as_given(http: httpx.Client) -> None:
    assert complete(http, seed=-1, max_tokens=3)["seed"] == -1


def test_choices_of_n_differ_and_the_first_is_the_request_alone(http: httpx.Client) -> None:
    many = complete(http, seed=21, n=4, max_tokens=12, return_token_ids=True)
    alone = complete(http, seed=21, max_tokens=12, return_token_ids=True)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
    assert len({tuple(ids) for ids in ids_of(many)}) == 4
    assert ids_of(many)[0] == ids_of(alone)[0]
    assert many["usage"]["completion_tokens"] == sum(map(len, ids_of(many)))
    assert many["metrics"] is None


@pytest.mark.case("sglang-jax 1103")
def test_greedy_choices_of_n_are_equal(http: httpx.Client) -> None:
    assert (
        len({tuple(ids) for ids in ids_of(complete(http, temperature=0, n=3, max_tokens=9, return_token_ids=True))})
        == 1
    )


def test_each_prompt_of_a_list_is_answered_as_if_sent_alone(http: httpx.Client) -> None:
    prompts = ["Hello", PROMPT, "今天天气", "0 1 2 3"]
    together = complete(http, prompt=prompts, n=2, seed=8, max_tokens=10, return_token_ids=True)
    assert [choice["index"] for choice in together["choices"]] == list(range(8))
    alone = [complete(http, prompt=prompt, n=2, seed=8, max_tokens=10, return_token_ids=True) for prompt in prompts]
    assert ids_of(together) == [ids for answer in alone for ids in ids_of(answer)]
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)


def test_ids_and_text_are_the_same_prompt(http: httpx.Client, service: Service) -> None:
    ids = service.tokenizer.encode(PROMPT)
    answers = [complete(http, prompt=prompt, seed=2, max_tokens=8) for prompt in (PROMPT, ids, [ids], [PROMPT])]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)


def test_best_of_returns_the_likeliest_and_counts_all(http: httpx.Client) -> None:
    all_four = complete(http, n=4, seed=31, max_tokens=6, logprobs=0)
    best = complete(http, n=2, best_of=4, seed=31, max_tokens=6)
    mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])  # noqa: E731
    ranked = sorted(all_four["choices"], key=mean, reverse=True)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"] == all_four["usage"]


def test_logprobs_name_the_token_and_the_best(http: httpx.Client) -> None:
    choice = complete(http, max_tokens=15, seed=1, logprobs=4)["choices"][0]
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {15}
    for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert top[token] == value <= 0
        assert 4 <= len(top) <= 5 or any(name.startswith("bytes:") for name in top)
    # What a token made final stands between its offset and the next one's: itself, after bytes that waited for it.
    ends = [*logprobs["text_offset"][1:], len(choice["text"])]
    for token, start, end in zip(logprobs["tokens"], logprobs["text_offset"], ends, strict=True):
        assert token.startswith("bytes:") or choice["text"][start:end].endswith(token)


def test_echo_scores_the_prompt_without_generating(http: httpx.Client, service: Service) -> None:
    answer = complete(http, echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(service.tokenizer.encode(PROMPT))
    assert "".join(logprobs["tokens"]) == PROMPT
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"][0] == 0


def test_echoed_logprobs_of_an_output_equal_those_it_was_generated_with(http: httpx.Client) -> None:
    generated = complete(http, max_tokens=12, seed=4, logprobs=0, return_token_ids=True)["choices"][0]
    prompt = generated["prompt_token_ids"] + generated["token_ids"]
    scored = complete(http, prompt=prompt, echo=True, max_tokens=0, logprobs=0)["choices"][0]
    assert scored["logprobs"]["token_logprobs"][-12:] == generated["logprobs"]["token_logprobs"]


def test_echo_with_output_joins_prompt_and_output(http: httpx.Client) -> None:
    plain = complete(http, max_tokens=6, seed=4, logprobs=2)["choices"][0]
    echoed = complete(http, max_tokens=6, seed=4, logprobs=2, echo=True)["choices"][0]
    assert echoed["text"] == PROMPT + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert echoed["logprobs"][name][-6:] == plain["logprobs"][name]
    shifted = [offset + len(PROMPT) for offset in plain["logprobs"]["text_offset"]]
    assert echoed["logprobs"]["text_offset"][-6:] == shifted


def test_prompt_logprobs_are_by_id(http: httpx.Client, service: Service) -> None:
    choice = complete(http, max_tokens=1, prompt_logprobs=2)["choices"][0]
    ids = service.tokenizer.encode(PROMPT)
    entries = choice["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(ids)
    for token_id, entry in zip(ids[1:], entries[1:], strict=True):
        assert 2 <= len(entry) <= 3
        assert entry[str(token_id)]["logprob"] <= 0
        assert entry[str(token_id)]["rank"] >= 1


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.case("V 47616")
def test_a_stop_string_ends_text_ids_logprobs_and_usage_together(http: httpx.Client, include: bool) -> None:
    whole = complete(http, max_tokens=40, seed=9, logprobs=0, return_token_ids=True)["choices"][0]
    stop = next(t for t in whole["logprobs"]["tokens"][5:] if not t.startswith("bytes:") and t.strip())
    answer = complete(
        http, max_tokens=40, seed=9, logprobs=0, return_token_ids=True, stop=stop, include_stop_str_in_output=include
    )
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    cut = whole["text"].index(stop) + (len(stop) if include else 0)
    assert choice["text"] == whole["text"][:cut]
    count = len(choice["token_ids"])
    assert choice["token_ids"] == whole["token_ids"][:count]
    assert choice["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:count]
    assert answer["usage"]["completion_tokens"] == count


def test_a_stop_token_ends_the_choice_without_text(http: httpx.Client) -> None:
    whole = complete(http, max_tokens=20, seed=9, return_token_ids=True)["choices"][0]
    stop = whole["token_ids"][7]
    choice = complete(http, max_tokens=20, seed=9, return_token_ids=True, stop_token_ids=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["token_ids"] == whole["token_ids"][: whole["token_ids"].index(stop) + 1]


def test_the_end_of_text_stops_unless_it_is_ignored(http: httpx.Client, service: Service) -> None:
    eos = service.tokenizer.encode(EOS)[0]
    body = {"logit_bias": {str(eos): 100}, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    ended = complete(http, **body)["choices"][0]
    assert (ended["token_ids"], ended["finish_reason"], ended["text"]) == ([eos], "stop", "")
    assert ended["stop_reason"] == eos
    going = complete(http, **body, ignore_eos=True, skip_special_tokens=False)["choices"][0]
    assert (going["token_ids"], going["finish_reason"], going["text"]) == ([eos] * 5, "length", EOS * 5)
    assert going["stop_reason"] is None
    late = complete(http, **body, min_tokens=3)["choices"][0]
    assert len(late["token_ids"]) == 4
    assert late["token_ids"][-1] == eos


def test_allowed_and_bad_tokens_are_honoured(http: httpx.Client) -> None:
    ids = ids_of(complete(http, allowed_token_ids=[80, 81], max_tokens=20, seed=1, return_token_ids=True))[0]
    assert set(ids) <= {80, 81}
    text = complete(http, bad_words=["&"], max_tokens=60, temperature=0)["choices"][0]["text"]
    assert "&" not in text


def test_truncation_keeps_the_end_of_the_prompt(http: httpx.Client, service: Service) -> None:
    ids = service.tokenizer.encode("0 1 2 3 4 5 6 7 8 9")
    cut = complete(http, prompt=ids, truncate_prompt_tokens=4, max_tokens=6, seed=1, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == ids[-4:]
    assert ids_of(cut) == ids_of(complete(http, prompt=ids[-4:], max_tokens=6, seed=1, return_token_ids=True))


def test_a_prompt_seen_before_comes_from_the_cache_with_the_same_answer(http: httpx.Client) -> None:
    prompt = "cached " * 20
    cold, warm = (complete(http, prompt=prompt, max_tokens=10, seed=3, cache_salt="one") for _ in range(2))
    other = complete(http, prompt=prompt, max_tokens=10, seed=3, cache_salt="two")
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold["choices"] == warm["choices"] == other["choices"]


@pytest.mark.parametrize(("prompt", "max_tokens"), [([5] * CONTEXT, 1), ([5] * 10, CONTEXT - 9), ("x" * 5000, 1)])
def test_what_exceeds_the_context_is_refused_with_its_code(http: httpx.Client, prompt: Any, max_tokens: int) -> None:
    response = http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_a_request_that_fills_the_context_exactly_is_served(http: httpx.Client) -> None:
    answer = complete(http, prompt=[70] * (CONTEXT - 20), max_tokens=20, ignore_eos=True, temperature=0)
    assert answer["usage"]["total_tokens"] == CONTEXT


def test_the_times_of_a_request_add_up(http: httpx.Client) -> None:
    metrics = complete(http, max_tokens=20, ignore_eos=True, seed=1)["metrics"]
    decode = metrics["generation_time_ms"] - metrics["time_to_first_token_ms"]
    assert metrics["mean_itl_ms"] * 19 == pytest.approx(decode, rel=0.01, abs=0.1)
    assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
    assert metrics["tokens_per_second"] == pytest.approx(20_000 / metrics["generation_time_ms"], rel=0.01)


@pytest.mark.case("S 39826")
def test_generated_tokens_are_counted_as_usage_counts_them(http: httpx.Client, base: str) -> None:
    before = metric(base, "generation_tokens_total")
    counted = sum(
        complete(http, max_tokens=25, seed=seed, stop=["e", "o"])["usage"]["completion_tokens"] for seed in range(6)
    )
    assert metric(base, "generation_tokens_total") - before == counted
