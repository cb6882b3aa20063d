"""Any combination of parameters gives one answer, with speculation and without, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from server.schemas import CompletionRequest
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, joined, running, sse_events

K = 4
# Few ids make texts that repeat, so drafts are accepted; the first is the end of text.
FEW = [0, 70, 71, 72, 73]


def some(values: list[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


# Values that are valid in any combination, or refused alike; a field is left out as often as it is there.
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": some(["0 1 2 0 1 2 0 1 2 0 1", "the quick the quick the", [70, 71, 70, 71, 70], ["a b a b", "好 好"]]),
    "max_tokens": st.integers(0, 24),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 3),
    "stream": st.booleans(),
    "stream_options": some([{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 5),
    "prompt_logprobs": st.integers(0, 3),
    "return_token_ids": st.just(True),
    "temperature": some([0, 0.3, 1, 2]),
    "top_p": some([0.2, 0.9]),
    "top_k": st.integers(-1, 40),
    "min_p": some([0.01, 0.3]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logit_bias": some([{"70": 3, "71": -3}, {"0": 100}, {"80": 5, "0": -100}]),
    "min_tokens": st.integers(0, 6),
    "allowed_token_ids": some([FEW, FEW[1:], [80, 81], list(range(340))]),
    "bad_words": some(["e", ["0 1", "好"], "the quick"]),
    "stop": some(["e", ["1 2", "b a b"], ["\ufffd", "a"]]),
    "stop_token_ids": some([[72], [70, 300]]),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "add_special_tokens": st.booleans(),
    "truncate_prompt_tokens": some([-1, 1, 3]),
    "priority": st.integers(-3, 3),
    "cache_salt": some(["one", "two"]),
    "prediction": some([{"type": "content", "content": "0 1 2 0 1 2 0 1 2 0 1 2"}]),
    "response_format": some([{"type": "text"}, {"type": "json_object"}]),
    "structured_outputs": some([{"choice": ["0 1 2", "0 1 2 0 1 2 3"]}, {"regex": "[012 ]{1,12}"}]),
    "timeout": some([300, 599.5]),
    "user": st.just("somebody"),
    "metadata": st.just({"a": "b"}),
    "store": st.just(False),
    "service_tier": st.just("auto"),
    "safety_identifier": st.just("x"),
    "prompt_cache_key": st.just("x"),
    "include_obfuscation": st.just(False),
}
ALWAYS = {"prompt", "seed", "return_token_ids"}
OPTIONAL = {name: values for name, values in FIELDS.items() if name not in ALWAYS}
BODIES = st.fixed_dictionaries({name: FIELDS[name] for name in sorted(ALWAYS)}, optional=OPTIONAL)


def test_the_combinations_have_every_field() -> None:
    assert set(FIELDS) == set(CompletionRequest.model_fields) - {"model", "speculation"}


@pytest.fixture(scope="module")
def service(tiny_model: Path, model_home: Path) -> Service:
    """Fixed draft lengths: every request is drafted for, whether or not it pays."""
    return build_service(tiny_model, model_home, draft_length="fixed", num_speculative_tokens=K)


@pytest.fixture(scope="module")
def http(service: Service) -> Iterator[httpx.Client]:
    with running(service) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield client


def answer(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """What a request and its seed decide: the status, the choices, usage without what caches and drafts did."""
    response = http.post("/v1/completions", json={"model": MODEL_NAME, **body})
    if response.status_code != 200:
        return {"status": response.status_code, "error": response.json()["error"]}
    if not body.get("stream"):
        found = response.json()
        choices, usage = found["choices"], found["usage"]
    else:
        chunks = sse_events(response.content)
        if "error" in chunks[-1]:
            return {"status": 400, "error": chunks[-1]["error"]}
        choices, usage = joined(chunks), chunks[-1].get("usage")
    if usage is not None:
        usage = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"status": 200, "choices": choices, "usage": usage}


# No shrinking: each try is several requests, and a failure should be told before the test's time is up.
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    body=BODIES,
    drafter=some(["auto", "ngram", "suffix"]),
    k=st.integers(1, K),
    cut=st.none() | st.tuples(st.integers(0, 30), st.integers(1, 4)),
)
@pytest.mark.case("V 34497", "V 47616")
def test_any_combination_gives_the_same_answer_on_and_off(
    http: httpx.Client, body: dict[str, Any], drafter: str, k: int, cut: tuple[int, int] | None
) -> None:
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    off = {**body, "speculation": {"num_speculative_tokens": 0}}
    on = {**body, "speculation": {"num_speculative_tokens": k, "drafter": drafter}}
    expected = answer(http, off)
    if cut is not None and expected["status"] == 200:  # a stop string that the output has
        text = expected["choices"][0]["text"]
        stop = text[cut[0] : cut[0] + cut[1]]
        on["stop"] = off["stop"] = [stop or text[:1] or "e"]
        expected = answer(http, off)
    event(f"status {expected['status']}")
    assert answer(http, on) == expected
    if expected["status"] != 200:
        return
    event("finish " + str(expected["choices"][0]["finish_reason"]))
    # The other form of the answer: where it can be streamed, a stream, and the other way round.
    if body.get("best_of") is None and body.get("prompt_logprobs") is None:
        other = {**on, "stream": not body.get("stream"), "stream_options": {"include_usage": True}}
        if not other["stream"]:
            del other["stream_options"]
        found = answer(http, other)
        assert found["choices"] == expected["choices"]
        assert expected["usage"] in (found["usage"], None)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "frequency_penalty": 2, "presence_penalty": -2, "repetition_penalty": 1.3},
    {"seed": 3, "logit_bias": {"70": 5, "0": -100}, "logprobs": 2, "n": 2},
    {"seed": 4, "structured_outputs": {"regex": "([012] ){4,12}"}},
    {"seed": 5, "structured_outputs": {"regex": "([012] ){4,12}"}, "frequency_penalty": 1, "logit_bias": {"70": 5}},
    {"temperature": 0, "stop": ["1 2"], "min_tokens": 4, "echo": True},
]


def test_penalties_bias_grammar_and_seeds_in_one_batch_with_plain_requests_change_nothing(http: httpx.Client) -> None:
    bodies = [{"prompt": "0 1 2 0 1 2 0 1", "max_tokens": 20, "return_token_ids": True, **more} for more in MIXED]
    alone = [answer(http, {**body, "speculation": {"num_speculative_tokens": 0}}) for body in bodies]
    assert {found["status"] for found in alone} == {200}
    with ThreadPoolExecutor(len(bodies)) as threads:
        together = list(
            threads.map(lambda body: answer(http, {**body, "speculation": {"num_speculative_tokens": K}}), bodies)
        )
    assert together == alone
