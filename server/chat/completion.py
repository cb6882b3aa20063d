"""From the body of a chat request to its answer, whole or streamed."""

from __future__ import annotations

from server.chat.answer import ChatChoice, DeltaParser, PlainText
from server.chat.schema import ChatRequest
from server.completion import Completion
from server.errors import bad_request
from server.resolve import (
    ResolvedCompletion,
    ResolvedPrompt,
    build_prompt,
    build_requests,
    check_common_limits,
    check_fewest,
)
from server.service import Service


async def begin_chat(service: Service, request: ChatRequest, answer_id: str, arrival_time: float) -> Completion:
    """Check, render, tokenize and queue it. Raises APIError."""
    with service.counting_refusals():
        check_chat_limits(request, service)
    service.check_admission(1)
    with service.counting_refusals():
        resolved = await resolve_chat(service, request, answer_id, arrival_time)
    prompt = resolved.prompts[0]
    return Completion(
        service,
        request,
        resolved,
        service.submit(resolved.engine_requests),
        choices={
            spec.index: ChatChoice(spec.index, prompt, request, service.tokenizer, choice_parser(service, request))
            for spec in resolved.engine_requests[0].choices
        },
        answer_id=answer_id,
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
    )


def check_chat_limits(request: ChatRequest, service: Service) -> None:
    """What can be refused before anything is rendered or built. Raises APIError."""
    check_common_limits(request, service.facts, service.settings)
    if request.n > service.settings.max_choices:
        raise bad_request(f"n must be at most {service.settings.max_choices}; it is {request.n}", "n")


async def resolve_chat(
    service: Service, request: ChatRequest, answer_id: str, arrival_time: float
) -> ResolvedCompletion:
    """From messages to engine requests; ``check_chat_limits`` came before. Raises APIError."""
    chat = await service.chat.render(request.messages, None)
    if request.truncate_prompt_tokens is None:
        check_fewest(chat.fewest_tokens(service.chat.tokenizer), chat.num_chars, request, service.facts)
    ids = await service.chat.encode(chat, request.add_special_tokens)
    prompt = build_prompt(ids, None, request, service.facts)
    grammar = await service.grammars.of(request)
    return await build_requests(
        request,
        (ResolvedPrompt(prompt.token_ids, None),),
        tokenizer=service.tokenizer,
        facts=service.facts,
        request_id=answer_id,
        arrival_time=arrival_time,
        grammar=grammar,
    )


def choice_parser(service: Service, request: ChatRequest) -> DeltaParser:
    """Makes deltas of the text of one choice."""
    return PlainText()
