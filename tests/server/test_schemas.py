"""Every parameter is honoured or refused by name: the table of what is refused, and of what is inert."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import APIError
from server.resolve import ModelFacts, check_limits
from server.schemas import CompletionRequest, parse_completion
from server.settings import load_settings

FACTS = ModelFacts(
    names=("m",),
    max_model_len=100,
    vocab_size=50,
    embedding_rows=40,
    eos_token_ids=frozenset({0}),
    kv_capacity=1000,
    num_speculative_tokens=4,
    drafters=("ngram",),
)

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"temperature": v}, "temperature") for v in ("1", True, -0.1, 2.1, [])),
    *(({"top_p": v}, "top_p") for v in (0, 1.1, "1", False)),
    *(({"min_p": v}, "min_p") for v in (-0.1, 1.1)),
    *(({"top_k": v}, "top_k") for v in (-2, 1.5, True)),
    *(({"n": v}, "n") for v in (0, 17, 10**9, True, 1.0, "1")),
    *(({"best_of": v}, "best_of") for v in (0, 17, "2")),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    *(({"max_tokens": v}, "max_tokens") for v in (-1, 100, 101, 10**12, 1.0, "5", True)),
    ({"min_tokens": 17}, "min_tokens"),
    *(({"logprobs": v}, "logprobs") for v in (-1, 21, True, "1")),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    *(({"seed": v}, "seed") for v in (2**63, -(2**63) - 1, 1.5, "1", True)),
    *(({"frequency_penalty": v}, "frequency_penalty") for v in (2.1, -2.1, "0")),
    *(({"presence_penalty": v}, "presence_penalty") for v in (2.1, -2.1)),
    *(({"repetition_penalty": v}, "repetition_penalty") for v in (0, -1)),
    *(({"stop": v}, "stop") for v in ("", [""], [1], 1, ["a"] * 5, {"a": 1})),
    *(({"stop_token_ids": v}, "stop_token_ids") for v in ([-1], [50], [True], ["1"], 3, [1] * 4097)),
    *(({"allowed_token_ids": v}, "allowed_token_ids") for v in ([], [50], [1.0], [1] * 51)),
    *(({"bad_words": v}, "bad_words") for v in ([""], [3], ["a"] * 257, ["a" * 257], "a" * 257)),
    *(
        ({"logit_bias": v}, "logit_bias")
        for v in ({"50": 1}, {"-1": 1}, {"x": 1}, {"1": 101}, {"1": True}, {"1": "2"}, [1], {"1": 1, "01": 2})
    ),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    *(
        ({"prompt": v}, "prompt")
        for v in (
            "",
            [],
            [""],
            [[]],
            ["a", 1],
            [1, "a"],
            [1, True],
            [[1], "a"],
            [-1],
            [40],
            [[1], [40]],
            [1.0],
            {},
            3,
            [None],
        )
    ),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 128, "n": 3}, "n"),
    *(({"stream": v}, "stream") for v in ("true", 1)),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    *(({"echo": v}, "echo") for v in ("x", 1)),
    ({"speculation": {"num_speculative_tokens": 5}}, "speculation.num_speculative_tokens"),
    ({"speculation": {"num_speculative_tokens": -1}}, "speculation.num_speculative_tokens"),
    ({"speculation": {"drafter": "oracle"}}, "speculation.drafter"),
    ({"speculation": {"k": 1}}, "speculation.k"),
    ({"speculation": 3}, "speculation"),
    *(({"prediction": v}, "prediction") for v in ("x", 3, [], [{"type": "content", "content": "a"}])),
    ({"prediction": {"content": "a"}}, "prediction.type"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    *(({"prediction": {"type": v, "content": "a"}}, "prediction.type") for v in ("text", None, 1)),
    ({"prediction": {"type": "content", "content": "a", "role": "x"}}, "prediction.role"),
    ({"prediction": {str(i): 1 for i in range(17)}}, "prediction"),
    *(
        ({"prediction": {"type": "content", "content": v}}, "prediction.content")
        for v in (
            None,
            3,
            [],
            ["a"],
            {"type": "text", "text": "a"},
            [{"type": "text"}],
            [{"text": "a"}],
            [{"type": "text", "text": 1}],
            [{"type": "text", "text": None}],
            [{"type": "image_url", "text": "a"}],
            [{"type": "text", "text": "a"}, {"type": "text", "text": "a", "id": 1}],
            [{"type": "text", "text": "a"}] * 1025,
        )
    ),
    *(({"truncate_prompt_tokens": v}, "truncate_prompt_tokens") for v in (-2, "3")),
    *(({"priority": v}, "priority") for v in (2**40, 1.5)),
    *(({"cache_salt": v}, "cache_salt") for v in ("", 3)),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"user": 3}, "user"),
    ({"include_obfuscation": True}, "include_obfuscation"),
    *(({name: "x"}, name) for name in ("suffix", "response_format", "structured_outputs")),
    *(({name: None}, name) for name in ("nonsense", "messages", "use_beam_search")),
]


def check(body: dict[str, Any]) -> CompletionRequest:
    request = parse_completion(body)
    check_limits(request, FACTS, load_settings())
    return request


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        check({"model": "m", "prompt": "a", **change})
    error = caught.value
    assert error.status == 400
    assert error.param == param
    assert param.split(".")[0] in error.message
    assert "Input should" not in error.message


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_required_parameters_are_named(missing: str) -> None:
    body = {"model": "m", "prompt": "a"}
    del body[missing]
    with pytest.raises(APIError, match="required") as caught:
        check(body)
    assert caught.value.param == missing


def test_an_unknown_model_is_a_404() -> None:
    with pytest.raises(APIError) as caught:
        check({"model": "other", "prompt": "a"})
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    "inert",
    [
        {"user": "u"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"service_tier": "default"},
        {"safety_identifier": "s"},
        {"prompt_cache_key": "k"},
        {"include_obfuscation": False},
        {"suffix": None, "temperature": None, "n": None, "stop": None, "logit_bias": None, "stream_options": None},
    ],
    ids=str,
)
def test_known_and_inert_parameters_are_accepted(inert: dict[str, Any]) -> None:
    assert check({"model": "m", "prompt": "a", **inert}).temperature == 1.0


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("ab", ("ab",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3]))],
)
def test_all_four_forms_of_a_prompt_become_a_tuple_of_prompts(prompt: Any, parsed: Any) -> None:
    assert check({"model": "m", "prompt": prompt}).prompt == parsed
