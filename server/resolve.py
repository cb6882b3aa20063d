"""From a validated body to engine requests: what depends on the model, the tokenizer or a setting is decided here."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scheduler.request import ChoiceSpec, EngineRequest
from server.errors import APIError, bad_request, shorten
from server.output_format import wanted_format
from server.schemas import CompletionRequest, GenerationRequest
from server.settings import Settings
from specdec.noise import mix_seed
from specdec.params import SamplingParams

# Codes of the refusals for size.
CONTEXT_LENGTH = "context_length_exceeded"
KV_CAPACITY = "kv_capacity_exceeded"
MAX_RANDOM_SEED = 2**53  # JavaScript keeps no larger integer exactly
# Texts above this are tokenized in a thread, so that one client cannot hold up the event loop.
THREAD_ABOVE_CHARS = 2048


class Tokenizer(Protocol):
    """What the server needs of a tokenizer. Thread-safe."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def fewest_tokens(self, text: str) -> int: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def decode_many(self, lists: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int  # width of a logits row
    embedding_rows: int  # a prompt's ids must be below this
    eos_token_ids: frozenset[int]
    kv_capacity: int  # tokens
    num_speculative_tokens: int
    drafters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    token_ids: tuple[int, ...]
    text: str | None  # the prompt as it was sent, if it was text and is whole


@dataclass(frozen=True, slots=True)
class ResolvedCompletion:
    """Everything of a request that is decided before it is queued."""

    seed: int  # as the client knows it
    num_sampled: int  # choices computed for each prompt: n, or best_of
    prompts: tuple[ResolvedPrompt, ...]
    engine_requests: tuple[EngineRequest, ...]  # one for each prompt
    num_predicted: int | None = None  # tokens of the prediction; None without one


def check_limits(request: CompletionRequest, facts: ModelFacts, settings: Settings) -> None:
    """What can be refused before anything is tokenized or built. Raises APIError."""
    check_common_limits(request, facts, settings)
    if request.best_of is not None:
        _check_at_most("best_of", request.best_of, settings.max_n)
        if request.best_of < request.n:
            raise bad_request(f"best_of ({request.best_of}) must be at least n ({request.n})", "best_of")
        if request.stream:
            raise bad_request("best_of cannot be streamed; leave out one of best_of and stream", "best_of")
    num_prompts = len(request.prompt)
    most = min(settings.max_prompts, settings.max_waiting)  # more could never wait together
    if num_prompts > most:
        raise bad_request(f"prompt holds {num_prompts} prompts; at most {most} are allowed", "prompt")
    if num_prompts * request.num_sampled > settings.max_choices:
        raise bad_request(
            f"{num_prompts} prompts with n (or best_of) {request.num_sampled} are "
            f"{num_prompts * request.num_sampled} choices; at most {settings.max_choices} are allowed",
            "n",
        )
    for prompt in request.prompt:
        if not isinstance(prompt, str):
            _check_prompt_ids(prompt, facts)


def check_common_limits(request: GenerationRequest, facts: ModelFacts, settings: Settings) -> None:
    """``check_limits`` of what all endpoints share. Raises APIError."""
    check_model(request.model, facts)
    _check_at_most("n", request.n, settings.max_n)
    if len(request.stop) > settings.max_stop:
        raise bad_request(f"stop holds {len(request.stop)} strings; at most {settings.max_stop} are allowed", "stop")
    _check_ids(request, facts)
    _check_speculation(request, facts, settings)
    limit, name = request.output_limit, request.output_limit_name
    if limit is not None:
        if request.min_tokens > limit:
            raise bad_request(f"min_tokens ({request.min_tokens}) must not be above {name} ({limit})", "min_tokens")
        if limit >= facts.max_model_len:  # no prompt is empty
            raise _too_long(name, f"{name} {limit} and a prompt", facts)
    wanted = wanted_format(request.response_format, request.structured_outputs)
    if request.timeout is not None and request.timeout > settings.request_timeout:
        raise bad_request(
            f"timeout must be at most {settings.request_timeout:g} seconds; it is {request.timeout:g}", "timeout"
        )
    if wanted is not None and request.ignore_eos:
        raise bad_request(f"ignore_eos cannot be combined with {wanted.param}: the end is the grammar's", "ignore_eos")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed; leave out stream", "prompt_logprobs")


def check_model(name: str, facts: ModelFacts) -> None:
    """Raises APIError 404."""
    if name not in facts.names:
        raise APIError(404, f"the model {shorten(name)} does not exist", param="model", code="model_not_found")


def _check_at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise bad_request(f"{name} must be at most {limit}; it is {value}", name)


def _check_prompt_ids(prompt: Sequence[int], facts: ModelFacts) -> None:
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= facts.embedding_rows:
        wrong = low if low < 0 else high
        raise bad_request(
            f"prompt holds the token id {shorten(wrong)}; ids go from 0 to {facts.embedding_rows - 1}", "prompt"
        )


def _check_ids(request: GenerationRequest, facts: ModelFacts) -> None:
    allowed = request.allowed_token_ids
    if allowed is not None and not 1 <= len(allowed) <= facts.vocab_size:
        raise bad_request(
            f"allowed_token_ids holds {len(allowed)} ids; it must hold 1 to {facts.vocab_size}", "allowed_token_ids"
        )
    named: dict[str, tuple[int, ...]] = {
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": allowed or (),
        "logit_bias": tuple(token for token, _ in request.logit_bias),
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < facts.vocab_size:
                raise bad_request(
                    f"{name} holds the token id {shorten(token)}; ids go from 0 to {facts.vocab_size - 1}", name
                )


def _check_speculation(request: GenerationRequest, facts: ModelFacts, settings: Settings) -> None:
    speculation = request.speculation
    if speculation is None:
        return
    if speculation.trace and not settings.speculation_trace:
        raise bad_request("speculation.trace is switched off on this server; leave it out", "speculation.trace")
    if speculation.trace and request.token_by_token:
        raise bad_request(
            "speculation.trace cannot be combined with stream_options.one_token_per_chunk: it is about steps",
            "speculation.trace",
        )
    count = speculation.num_speculative_tokens
    if count is not None and count > facts.num_speculative_tokens:
        raise bad_request(
            f"speculation.num_speculative_tokens must be at most {facts.num_speculative_tokens}; it is {count}",
            "speculation.num_speculative_tokens",
        )
    if speculation.drafter is not None and speculation.drafter not in facts.drafters:
        raise bad_request(
            f"speculation.drafter is {shorten(speculation.drafter)}; this server has "
            f"{', '.join(facts.drafters) or 'none'}",
            "speculation.drafter",
        )


def most_tokens(texts: Iterable[str], facts: ModelFacts) -> int:
    """What a prompt of these texts takes at most: one token a byte, and never more than the context.

    A template or a tokenizer may add some, so it is an estimate; what is longer than the context will be refused.
    """
    most, left = facts.max_model_len, facts.max_model_len
    for text in texts:
        left -= len(text) if len(text) >= left else len(text.encode())
        if left <= 0:
            return most
    return most - left


def most_prompt_tokens(request: CompletionRequest, facts: ModelFacts) -> int:
    """``most_tokens`` of all its prompts together, those in ids counted."""
    return sum(
        most_tokens((prompt,), facts) if isinstance(prompt, str) else min(len(prompt), facts.max_model_len)
        for prompt in request.prompt
    )


async def resolve_prompts(
    request: CompletionRequest, *, tokenizer: Tokenizer, facts: ModelFacts
) -> tuple[ResolvedPrompt, ...]:
    """Tokenize; ``check_limits`` came before. Raises APIError if a text is too long however it is tokenized."""
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    if request.truncate_prompt_tokens is None:
        check_lengths(texts, request, tokenizer, facts)
    encoded = iter(await encode_texts(texts, request.add_special_tokens, tokenizer))
    return tuple(
        build_prompt(next(encoded), prompt, request, facts)
        if isinstance(prompt, str)
        else build_prompt(prompt, None, request, facts)
        for prompt in request.prompt
    )


async def build_requests(
    request: GenerationRequest,
    prompts: tuple[ResolvedPrompt, ...],
    *,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    request_id: str,
    arrival_time: float,
    grammar: str | None = None,
    shown_special_ids: frozenset[int] = frozenset(),
) -> ResolvedCompletion:
    """From prompts in ids to engine requests, for every endpoint. ``grammar`` was checked (server/grammars.py).

    ``shown_special_ids`` are special tokens that the answer's reader has to see, whatever ``skip_special_tokens`` says.
    Raises APIError if a prompt and its output cannot fit.
    """
    limits = tuple(_check_fit(len(prompt.token_ids), request, facts) for prompt in prompts)
    prediction = await _prediction(request, tokenizer, facts)
    bad_words = await _bad_words(request.bad_words, tokenizer)
    _check_something_is_allowed(request, bad_words, facts)
    seed = secrets.randbelow(MAX_RANDOM_SEED) if request.seed is None else request.seed
    num_sampled = request.num_sampled
    params = replace(_sampling_params(request, bad_words, facts), grammar=grammar)
    engine_requests = tuple(
        EngineRequest(
            request_id=f"{request_id}-{i}",
            prompt_token_ids=prompt.token_ids,
            choices=tuple(
                ChoiceSpec(
                    index=i * num_sampled + j, params=replace(params, seed=mix_seed(seed, j), max_tokens=max_tokens)
                )
                for j in range(num_sampled)
            ),
            arrival_time=arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt or "",
            stop=request.stop,
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            shown_special_ids=shown_special_ids,
            # The rows that a cached prefix skips are the ones whose logprobs are wanted.
            read_prefix_cache=request.num_prompt_logprobs is None,
            prediction_token_ids=prediction,
        )
        for i, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True))
    )
    num_predicted = None if request.prediction is None else len(prediction)
    return ResolvedCompletion(seed, num_sampled, prompts, engine_requests, num_predicted)


def check_lengths(texts: Sequence[str], request: GenerationRequest, tokenizer: Tokenizer, facts: ModelFacts) -> None:
    """Refuse what is too long however it is tokenized, before any time is spent on it."""
    for text in texts:
        check_fewest(tokenizer.fewest_tokens(text), len(text), request, facts)


def check_fewest(fewest: int, num_chars: int, request: GenerationRequest, facts: ModelFacts) -> None:
    """``check_lengths`` of one prompt that takes ``fewest`` tokens or more."""
    least, name = _least_output(request)
    if fewest + least > facts.max_model_len:
        raise _too_long(
            request.prompt_name,
            f"a text of {num_chars} characters (at least {fewest} tokens) and {name} {least}",
            facts,
        )


def _least_output(request: GenerationRequest) -> tuple[int, str]:
    """What must fit behind a prompt, and the name of it."""
    if request.output_limit is not None:
        return request.output_limit, request.output_limit_name
    return max(1, request.min_tokens), request.output_limit_name


async def _prediction(request: GenerationRequest, tokenizer: Tokenizer, facts: ModelFacts) -> tuple[int, ...]:
    """Its ids as they would follow a prompt. One that no answer could hold is refused, before it is tokenized if its
    length shows that."""
    if request.prediction is None or not request.prediction.content:
        return ()
    text = request.prediction.content
    count, at_least = tokenizer.fewest_tokens(text), "at least "
    if count <= facts.max_model_len:
        (ids,) = await encode_texts([text], False, tokenizer)
        count, at_least = len(ids), ""
    if count > facts.max_model_len:
        raise bad_request(
            f"prediction has {at_least}{count} tokens, more than this model's context of {facts.max_model_len}",
            "prediction",
        )
    return tuple(ids)


async def encode_texts(texts: Sequence[str], add_special_tokens: bool, tokenizer: Tokenizer) -> list[list[int]]:
    if sum(map(len, texts)) > THREAD_ABOVE_CHARS:
        return await asyncio.to_thread(tokenizer.encode_many, texts, add_special_tokens)
    return tokenizer.encode_many(texts, add_special_tokens)


def build_prompt(ids: list[int], text: str | None, request: GenerationRequest, facts: ModelFacts) -> ResolvedPrompt:
    """Truncated as the request wants. Raises APIError if nothing is left."""
    keep = request.truncate_prompt_tokens
    if keep is not None:
        keep = facts.max_model_len - _least_output(request)[0] if keep == -1 else keep
        if keep < 1:
            raise bad_request(
                "truncate_prompt_tokens must be at least 1, or -1 for what max_tokens leaves of the context",
                "truncate_prompt_tokens",
            )
        if len(ids) > keep:
            ids, text = ids[-keep:], None
    if not ids:
        raise bad_request(f"{request.prompt_name} {shorten(text)} has no tokens", request.prompt_name)
    return ResolvedPrompt(tuple(ids), text)


def _check_fit(num_prompt: int, request: GenerationRequest, facts: ModelFacts) -> int:
    """The most tokens of a choice behind so long a prompt. Raises APIError if they cannot fit."""
    least, name = _least_output(request)
    if num_prompt + least > facts.max_model_len:
        raise _too_long(request.prompt_name, f"{num_prompt} prompt tokens and {name} {least}", facts)
    # The last output token needs no slot: nothing follows it.
    if max(num_prompt, num_prompt + least - 1) > facts.kv_capacity:
        raise bad_request(
            f"{num_prompt} prompt tokens and {name} {least} can never fit the KV cache of {facts.kv_capacity} tokens",
            name,
            KV_CAPACITY,
        )
    if request.output_limit is not None:
        return request.output_limit
    return min(facts.max_model_len - num_prompt, facts.kv_capacity - num_prompt + 1)


def _too_long(param: str, what: str, facts: ModelFacts) -> APIError:
    return bad_request(f"this model's context is {facts.max_model_len} tokens; {what} exceed it", param, CONTEXT_LENGTH)


def _stop_ids(request: GenerationRequest, facts: ModelFacts) -> frozenset[int]:
    return frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else facts.eos_token_ids)


def _check_something_is_allowed(
    request: GenerationRequest, bad_words: tuple[tuple[int, ...], ...], facts: ModelFacts
) -> None:
    """Refuse parameters that leave no token for the very first position, whatever the model says."""
    if request.allowed_token_ids is None or request.output_limit == 0:
        return
    left = set(request.allowed_token_ids).difference(word[0] for word in bad_words if len(word) == 1)
    causes = ["bad_words"] if request.bad_words else []
    if request.min_tokens > 0:
        left -= _stop_ids(request, facts)
        causes.append(f"min_tokens ({request.min_tokens}, which forbids the stop tokens)")
    if not left:
        raise bad_request(
            f"allowed_token_ids ({len(request.allowed_token_ids)} ids) leaves no token together with "
            f"{' and '.join(causes)}",
            "allowed_token_ids",
        )


def _sampling_params(
    request: GenerationRequest, bad_words: tuple[tuple[int, ...], ...], facts: ModelFacts
) -> SamplingParams:
    """All but the seed, the length and the grammar, which ``build_requests`` fills in."""
    speculation = request.speculation
    return SamplingParams(
        seed=0,
        max_tokens=0,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(request.top_k, 0),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias,
        min_tokens=request.min_tokens,
        stop_token_ids=_stop_ids(request, facts),
        allowed_token_ids=(
            None if request.allowed_token_ids is None else tuple(sorted(set(request.allowed_token_ids)))
        ),
        bad_words=bad_words,
        logprobs=request.num_logprobs,
        prompt_logprobs=request.num_prompt_logprobs,
        num_speculative_tokens=None if speculation is None else speculation.num_speculative_tokens,
        drafter=None if speculation is None else speculation.drafter,
        trace_drafts=request.traced,
    )


async def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenized at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    encoded = await encode_texts(texts, False, tokenizer)
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise bad_request(f"bad_words holds {shorten(text)}, which has no tokens", "bad_words")
    return tuple(dict.fromkeys(map(tuple, encoded)))
