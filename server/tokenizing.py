"""Text to token ids and back, for clients that count: bodies and answers of POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from server.errors import APIError, bad_request, shorten
from server.fields import MAX_STRING, Ids
from server.logprobs import token_text
from server.resolve import ModelFacts, Tokenizer, encode_texts
from server.schemas import Strict, parse_request

# More ids than this, or than the context if it is longer, are not put into one answer.
MAX_TOKENS = 65536
# Above this, ids are turned into text in a thread: the event loop also drives the engine.
THREAD_ABOVE_TOKENS = 1024


class TokenizeRequest(Strict):
    """The body of POST /tokenize with a text."""

    model: str | None = Field(None, max_length=MAX_STRING)
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = Field(None, max_length=MAX_STRING)
    tokens: Ids


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Raises APIError 400 with ``param`` named."""
    return parse_request(TokenizeRequest, body)


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises APIError 400 with ``param`` named."""
    return parse_request(DetokenizeRequest, body)


async def tokenize(request: TokenizeRequest, tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """vLLM's answer. A text that takes too many ids is refused, without being tokenized if its length shows that."""
    check_model(request.model, facts)
    most = max(MAX_TOKENS, facts.max_model_len)
    fewest = tokenizer.fewest_tokens(request.prompt)
    if fewest > most:
        raise _too_many("prompt", f"at least {fewest}", most)
    (ids,) = await encode_texts([request.prompt], request.add_special_tokens, tokenizer)
    if len(ids) > most:
        raise _too_many("prompt", str(len(ids)), most)
    return await tokens_answer(ids, request.return_token_strs, tokenizer, facts)


async def tokens_answer(
    ids: Sequence[int], with_strings: bool, tokenizer: Tokenizer, facts: ModelFacts
) -> dict[str, Any]:
    """``{count, max_model_len, tokens, token_strs}``; the strings are null unless wanted."""
    strings: list[str] | None = None
    if with_strings and len(ids) > THREAD_ABOVE_TOKENS:
        strings = await asyncio.to_thread(_strings, ids, tokenizer)
    elif with_strings:
        strings = _strings(ids, tokenizer)
    return {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": list(ids), "token_strs": strings}


async def detokenize(request: DetokenizeRequest, tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """vLLM's answer: the text, special tokens included."""
    check_model(request.model, facts)
    most = max(MAX_TOKENS, facts.max_model_len)
    ids = request.tokens
    if len(ids) > most:
        raise _too_many("tokens", str(len(ids)), most)
    wrong = next((token for token in ids if not 0 <= token < facts.embedding_rows), None)
    if wrong is not None:
        raise bad_request(
            f"tokens holds the token id {shorten(wrong)}; ids go from 0 to {facts.embedding_rows - 1}", "tokens"
        )
    if len(ids) > THREAD_ABOVE_TOKENS:
        (text,) = await asyncio.to_thread(tokenizer.decode_many, [ids], False)
    else:
        (text,) = tokenizer.decode_many([ids], False)
    return {"prompt": text}


def check_model(name: str | None, facts: ModelFacts) -> None:
    """Without a name it is the served model. Raises APIError 404."""
    if name is not None and name not in facts.names:
        raise APIError(404, f"the model {shorten(name)} does not exist", param="model", code="model_not_found")


def _strings(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [token_text(tokenizer, token_id) for token_id in ids]


def _too_many(param: str, count: str, most: int) -> APIError:
    return bad_request(f"{param} has {count} tokens; at most {most} are allowed", param)
