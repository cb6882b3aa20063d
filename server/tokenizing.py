"""Text to token ids and back, for clients that count: bodies and answers of POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from server.chat.messages import Messages
from server.errors import APIError, bad_request, shorten
from server.fields import MAX_STRING, Ids
from server.logprobs import token_text
from server.resolve import ModelFacts, Tokenizer, check_model, encode_texts
from server.schemas import Strict, parse_request
from server.service import Service
from server.tools.schema import ToolChoiceField, Tools, check_tool_fields

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


class TokenizeChatRequest(Strict):
    """The body of POST /tokenize with a chat: what POST /v1/chat/completions makes a prompt of."""

    model: str | None = Field(None, max_length=MAX_STRING)
    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: bool = False  # a template writes its own
    return_token_strs: bool = False
    # vLLM's clients send them; a chat is always rendered up to where the model's answer begins.
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False


class DetokenizeRequest(Strict):
    """The body of POST /detokenize."""

    model: str | None = Field(None, max_length=MAX_STRING)
    tokens: Ids


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest | TokenizeChatRequest:
    """With messages it is a chat. Raises APIError 400 with ``param`` named."""
    if "messages" not in body:
        for name in TokenizeChatRequest.model_fields:
            if name in body and name not in TokenizeRequest.model_fields:
                raise bad_request(f"{name} is of a chat, which has messages; they are missing", name)
        return parse_request(TokenizeRequest, body)
    if "prompt" in body:
        raise bad_request("prompt cannot be combined with messages: they make a prompt; give one of them", "prompt")
    request = parse_request(TokenizeChatRequest, body)
    check_tool_fields(request.tools, request.tool_choice, request.parallel_tool_calls)
    return request


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises APIError 400 with ``param`` named."""
    return parse_request(DetokenizeRequest, body)


async def tokenize(request: TokenizeRequest, tokenizer: Tokenizer, facts: ModelFacts) -> dict[str, Any]:
    """vLLM's answer. A text that takes too many ids is refused, without being tokenized if its length shows that."""
    _check_model(request.model, facts)
    most = max(MAX_TOKENS, facts.max_model_len)
    fewest = tokenizer.fewest_tokens(request.prompt)
    if fewest > most:
        raise _too_many("prompt", f"at least {fewest}", most)
    (ids,) = await encode_texts([request.prompt], request.add_special_tokens, tokenizer)
    if len(ids) > most:
        raise _too_many("prompt", str(len(ids)), most)
    return await tokens_answer(ids, request.return_token_strs, tokenizer, facts)


async def tokenize_chat(request: TokenizeChatRequest, service: Service) -> dict[str, Any]:
    """The ids of the prompt that the same chat has as a request."""
    _check_model(request.model, service.facts)
    plan = service.tools.plan(
        request.tools, request.tool_choice, request.parallel_tool_calls, grammars=service.grammars.available
    )
    chat = await service.chat.render(*service.tools.told(request.messages, plan))
    most = max(MAX_TOKENS, service.facts.max_model_len)
    fewest = await service.chat.fewest_tokens(chat)
    if fewest > most:
        raise _too_many("messages", f"at least {fewest}", most)
    ids = await service.chat.encode(chat, request.add_special_tokens)
    if len(ids) > most:
        raise _too_many("messages", str(len(ids)), most)
    return await tokens_answer(ids, request.return_token_strs, service.tokenizer, service.facts)


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
    _check_model(request.model, facts)
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


def _check_model(name: str | None, facts: ModelFacts) -> None:
    """Without a name it is the served model. Raises APIError 404."""
    if name is not None:
        check_model(name, facts)


def _strings(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [token_text(tokenizer, token_id) for token_id in ids]


def _too_many(param: str, count: str, most: int) -> APIError:
    return bad_request(f"{param} has {count} tokens; at most {most} are allowed", param)
