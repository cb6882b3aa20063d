"""From a validated body to engine requests: what becomes of the prompt, and what reaches the scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from model.tokenizer import Tokenizer
from scheduler.request import EngineRequest
from server.resolve import ModelFacts, build_requests, resolve_prompts
from server.schemas import parse_completion
from tests.server.builders import EOS, byte_level_tokenizer

CONTEXT = 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One that puts a token in front of every text."""
    backend = byte_level_tokenizer().backend
    backend.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, 0)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, bos_token=EOS))


def resolved(tokenizer: Tokenizer, **body: Any) -> EngineRequest:
    facts = ModelFacts(
        names=("m",),
        max_model_len=CONTEXT,
        vocab_size=tokenizer.vocab_size,
        embedding_rows=tokenizer.vocab_size,
        eos_token_ids=frozenset({0}),
        kv_capacity=1000,
        num_speculative_tokens=4,
        drafters=("ngram",),
    )
    request = parse_completion({"model": "m", "prompt": "Hello, world", **body})
    prompts = asyncio.run(resolve_prompts(request, tokenizer=tokenizer, facts=facts))
    done = build_requests(request, prompts, tokenizer=tokenizer, facts=facts, request_id="r", arrival_time=1.0)
    return asyncio.run(done).engine_requests[0]


def test_special_tokens_stand_in_front_of_a_text_unless_they_are_not_wanted(tokenizer: Tokenizer) -> None:
    with_them = resolved(tokenizer).prompt_token_ids
    without = resolved(tokenizer, add_special_tokens=False).prompt_token_ids
    assert with_them == (0, *without)
    assert 0 not in without


def test_ids_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    assert resolved(tokenizer, prompt=[5, 6, 7]).prompt_token_ids == (5, 6, 7)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "left"), [(1, 16, 1), (7, 16, 7), (60, 0, 39), (-1, 16, 24), (-1, 39, 1)]
)
def test_truncation_keeps_the_last_tokens(tokenizer: Tokenizer, keep: int, max_tokens: int, left: int) -> None:
    ids = list(range(10, 10 + (39 if keep == 60 else 100)))
    request = resolved(tokenizer, prompt=ids, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert request.prompt_token_ids == tuple(ids[-left:])


@pytest.mark.parametrize(
    ("field", "value"), [("priority", -7), ("cache_salt", "tenant"), ("include_stop_str_in_output", True)]
)
def test_what_the_scheduler_decides_by_reaches_it(tokenizer: Tokenizer, field: str, value: Any) -> None:
    assert getattr(resolved(tokenizer, **{field: value}), field) == value


def test_a_bad_word_is_forbidden_at_the_start_and_behind_a_space(tokenizer: Tokenizer) -> None:
    (choice,) = resolved(tokenizer, bad_words="fox").choices
    words = {tokenizer.decode(ids) for ids in choice.params.bad_words}
    assert words == {"fox", " fox"}


def test_only_scored_prompts_skip_the_prefix_cache(tokenizer: Tokenizer) -> None:
    bodies = ({}, {"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 0})
    assert [resolved(tokenizer, **body).read_prefix_cache for body in bodies] == [True, True, True, False, False]
