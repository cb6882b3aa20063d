"""From the body of a chat request to its answer, whole or streamed."""

from __future__ import annotations

from scheduler.room import Reservation
from server.chat.answer import ChatChoice, DeltaParser, PlainText
from server.chat.messages import texts_in
from server.chat.schema import ChatRequest
from server.comeback import NO_RETRIES, Retries
from server.completion import Completion
from server.deadline import Deadline, bound
from server.errors import bad_request
from server.output_format import wanted_format
from server.resolve import (
    ResolvedCompletion,
    ResolvedPrompt,
    build_prompt,
    build_requests,
    check_common_limits,
    check_fewest,
    most_tokens,
)
from server.service import Service
from server.tools.plan import ToolPlan
from server.tracing.asked import note_queued
from server.tracing.trace import RequestTrace


async def begin_chat(
    service: Service,
    request: ChatRequest,
    answer_id: str,
    arrival_time: float,
    deadline: Deadline | None = None,
    key: str | None = None,
    trace: RequestTrace | None = None,
    retries: Retries = NO_RETRIES,
) -> Completion:
    """Check it, reserve room for it, render, tokenize and queue it. Raises APIError, at the latest when ``deadline``
    passes. ``key`` names the API key that the request came with; ``trace`` hears what was queued; ``retries``: of
    its client.
    """
    with service.counting_refusals():
        check_chat_limits(request, service)
    service.limiter.check_size(key, 1 + request.n * (request.output_limit or 1))
    shown = [*request.messages, *(tool.shown for tool in request.tools or ())]
    with service.reserve(1, most_tokens(texts_in(shown), service.facts), retries) as reservation:
        plan = plan_tools(service, request)
        async with bound(deadline):
            with service.counting_refusals():
                resolved = await resolve_chat(service, request, plan, reservation, answer_id, arrival_time)
        prompt, ends = resolved.prompts[0], service.facts.eos_token_ids
        choices = {
            spec.index: ChatChoice(spec.index, prompt, request, service.tokenizer, choice_parser(plan), ends)
            for spec in resolved.engine_requests[0].choices
        }
        open_ended = request.output_limit is None
        with service.charged(resolved.engine_requests, key, open_ended=open_ended) as engine_requests:
            events = service.submit(engine_requests, reservation)
            note_queued(trace, request, engine_requests, service.facts.names[0])
    return Completion(
        service,
        request,
        resolved,
        events,
        choices=choices,
        answer_id=answer_id,
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        deadline=deadline,
    )


def check_chat_limits(request: ChatRequest, service: Service) -> None:
    """What can be refused before anything is rendered or built. Raises APIError."""
    check_common_limits(request, service.facts, service.settings)
    if request.n > service.settings.max_choices:
        raise bad_request(f"n must be at most {service.settings.max_choices}; it is {request.n}", "n")


async def resolve_chat(
    service: Service,
    request: ChatRequest,
    plan: ToolPlan | None,
    reservation: Reservation,
    answer_id: str,
    arrival_time: float,
) -> ResolvedCompletion:
    """From messages to engine requests; ``check_chat_limits`` was called; corrects ``reservation``. Raises APIError."""
    chat = await service.chat.render(*service.tools.told(request.messages, plan))
    if request.truncate_prompt_tokens is None:
        check_fewest(await service.chat.fewest_tokens(chat), chat.num_chars, request, service.facts)
    ids = await service.chat.encode(chat, request.add_special_tokens)
    prompt = build_prompt(ids, None, request, service.facts)
    service.correct(reservation, len(prompt.token_ids))
    if plan is None or plan.grammar is None:
        grammar = await service.grammars.of(request)
    else:
        grammar = await service.grammars.check(plan.grammar, "tools")
    return await build_requests(
        request,
        (ResolvedPrompt(prompt.token_ids, None),),
        tokenizer=service.tokenizer,
        facts=service.facts,
        request_id=answer_id,
        arrival_time=arrival_time,
        grammar=grammar,
        shown_special_ids=frozenset() if plan is None else service.tools.special_markers,
    )


def plan_tools(service: Service, request: ChatRequest) -> ToolPlan | None:
    """None if no tool may be called. Raises APIError if the answer is to be something that calls are not."""
    wanted = wanted_format(request.response_format, request.structured_outputs)
    answer = request.response_format if wanted is request.response_format else None
    try:
        plan = service.tools.plan(
            request.tools,
            request.tool_choice,
            request.parallel_tool_calls,
            answer=None if answer is None else answer.schema,
            grammars=service.grammars.available,
            skip_special_tokens=request.skip_special_tokens,
        )
    except ValueError as error:
        raise bad_request(f"response_format cannot be combined with tools: {error}", "response_format") from None
    if plan is not None and wanted is not None and wanted is not answer:
        raise bad_request(f"{wanted.param} cannot be combined with tools that may be called", wanted.param)
    if plan is not None and plan.grammar is not None and request.ignore_eos:
        raise bad_request(
            "ignore_eos cannot be combined with tools that may be called: the end is the grammar's", "ignore_eos"
        )
    return plan


def choice_parser(plan: ToolPlan | None) -> DeltaParser:
    """Makes deltas of the text of one choice."""
    return PlainText() if plan is None else plan.parser()
