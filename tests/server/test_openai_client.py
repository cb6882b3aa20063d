"""OpenAI's own Python client, sync and async, against a real port: every parameter, whole and streamed."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import openai
import pytest
from openai.resources import Completions
from openai.types import Completion

from server.schemas import CompletionRequest
from server.service import Service
from tests.server.builders import CONTEXT, MODEL_NAME, joined

PROMPT = "the quick brown fox 0 1 2 0 1 2"
# What the client takes by name and sends. Its timeout is its own: it does not send it.
NATIVE = set(inspect.signature(Completions.create).parameters) - {"timeout"}

# Together they hold every field; each alone is a valid request.
GROUPS: list[dict[str, Any]] = [
    {"temperature": 0, "seed": 3, "max_tokens": 20, "logprobs": 2, "echo": True, "stop": ["zzz"], "user": "somebody"},
    {"seed": 4, "n": 3, "top_p": 0.9, "max_tokens": 12, "frequency_penalty": 1.2, "presence_penalty": -0.5},
    {"seed": 5, "logit_bias": {"70": 4, "71": -100}, "best_of": 1, "logprobs": 0, "min_tokens": 3, "priority": -1},
    {
        "seed": 6,
        "top_k": 20,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "bad_words": ["the"],
        "stop_token_ids": [90],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "cache_salt": "mine",
        "speculation": {"num_speculative_tokens": 4},
    },
    {
        "seed": 7,
        "allowed_token_ids": [70, 71, 72],
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 6,
        "prediction": {"type": "content", "content": "0 1 2"},
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "x",
        "include_obfuscation": False,
    },
    {"seed": 8, "structured_outputs": {"regex": "[a-c ]{1,20}"}},
    {"seed": 9, "response_format": {"type": "text"}, "stop": "e", "timeout": 60},
]


def arguments(**body: Any) -> dict[str, Any]:
    """As the client takes them: what it knows by name, the rest in ``extra_body``."""
    body = {"model": MODEL_NAME, "prompt": PROMPT, "return_token_ids": True, **body}
    extra = {name: body.pop(name) for name in list(body) if name not in NATIVE}
    return {**body, "extra_body": extra}


@contextmanager
def sync_client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def async_client(base: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask_sync(base: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the whole answer, the chunks of a stream)"""
    with sync_client(base) as client:
        whole = client.completions.create(**arguments(**body))
        with client.completions.create(**arguments(**body), stream=True, stream_options=USAGE) as stream:
            return whole.model_dump(), [chunk.model_dump() for chunk in stream]


def ask_async(base: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async def ask() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with async_client(base) as client:
            whole = client.completions.create(**arguments(**body))
            stream = await client.completions.create(**arguments(**body), stream=True, stream_options=USAGE)
            chunks = [chunk.model_dump() async for chunk in stream]
            return (await whole).model_dump(), chunks

    return asyncio.run(ask())


USAGE = {"include_usage": True}
Ask = Callable[[str, dict[str, Any]], tuple[dict[str, Any], list[dict[str, Any]]]]


def test_the_groups_hold_every_parameter() -> None:
    asked = {"model", "prompt", "return_token_ids", "stream", "stream_options", "prompt_logprobs"}.union(*GROUPS)
    assert asked == set(CompletionRequest.model_fields)


@pytest.mark.parametrize("ask", [ask_sync, ask_async])
@pytest.mark.parametrize("body", GROUPS, ids=lambda body: ",".join(body)[:40])
def test_a_stream_joins_to_the_whole_answer_in_either_client(base: str, body: dict[str, Any], ask: Ask) -> None:
    # The best of one cannot be streamed, though it is what a stream gives.
    whole, chunks = ask(base, {name: value for name, value in body.items() if name != "best_of"})
    choices = whole["choices"]
    assert len(choices) == body.get("n", 1)
    assert joined(chunks) == choices
    assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
    counted = {name: chunks[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert counted.items() <= whole["usage"].items()
    assert counted["completion_tokens"] == sum(len(choice["token_ids"]) for choice in choices)
    assert {chunk["seed"] for chunk in chunks} == {whole["seed"]}
    assert chunks[-1]["choices"] == []


def test_what_cannot_be_streamed_comes_whole(base: str) -> None:
    with sync_client(base) as client:
        best = client.completions.create(**arguments(best_of=3, n=2, seed=1, logprobs=1, prompt_logprobs=1))
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.choices[0].prompt_logprobs[0] is None
    assert len(best.choices[0].prompt_logprobs) == len(best.choices[0].prompt_token_ids)


def test_models_are_listed_and_found(base: str) -> None:
    with sync_client(base) as client:
        (card,) = client.models.list().data
        assert card.id == MODEL_NAME
        assert card.max_model_len == CONTEXT
        assert client.models.retrieve(MODEL_NAME) == card
        with pytest.raises(openai.NotFoundError) as error:
            client.models.retrieve("other")
    assert error.value.code == "model_not_found"


def test_text_and_ids_by_way_of_the_client(base: str, service: Service) -> None:
    with openai.OpenAI(base_url=base, api_key="none") as client:
        ids: Any = client.post("/tokenize", body={"model": MODEL_NAME, "prompt": PROMPT}, cast_to=object)
        text: Any = client.post("/detokenize", body={"tokens": ids["tokens"]}, cast_to=object)
    assert ids["tokens"] == service.tokenizer.encode(PROMPT)
    assert text["prompt"] == PROMPT


@pytest.mark.parametrize(
    ("body", "kind", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"suffix": "end"}, openai.BadRequestError, "suffix", "unsupported_parameter"),
        ({"unknown": 1}, openai.BadRequestError, "unknown", "unknown_parameter"),
        ({"max_tokens": CONTEXT + 1}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"stop": ["a"] * 5}, openai.BadRequestError, "stop", "invalid_value"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_is_the_clients_own_kind_with_its_parameter(
    base: str, body: dict[str, Any], kind: type[openai.APIStatusError], param: str, code: str, stream: bool
) -> None:
    with sync_client(base) as client, pytest.raises(kind) as error:
        client.completions.create(**arguments(**body), stream=stream)
    assert (error.value.param, error.value.code, error.value.type) == (param, code, "invalid_request_error")


def test_a_failure_in_a_stream_is_an_error_to_the_client(base: str) -> None:
    body = arguments(repetition_penalty=1e-320, temperature=0, stream=True)
    with sync_client(base) as client, pytest.raises(openai.APIError, match="repetition_penalty"):
        list(client.completions.create(**body))


def test_the_seed_of_an_answer_is_in_a_header_too(base: str) -> None:
    with sync_client(base) as client:
        raw = client.completions.with_raw_response.create(**arguments(max_tokens=2))
    answer: Completion = raw.parse()
    assert raw.headers["x-seed"] == str(answer.seed)


def test_many_async_requests_at_once_are_each_answered_as_alone(base: str) -> None:
    async def ask() -> list[list[int]]:
        async with async_client(base) as client:
            jobs = [client.completions.create(**arguments(seed=seed % 4, max_tokens=8)) for seed in range(12)]
            return [answer.choices[0].token_ids for answer in await asyncio.gather(*jobs)]

    found = asyncio.run(ask())
    assert found[:4] == found[4:8] == found[8:]
    assert len({tuple(ids) for ids in found}) == 4
