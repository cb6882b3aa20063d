"""What a request asked for, as attributes of its span: numbers and switches, never a text."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.request import EngineRequest
from server.schemas import GenerationRequest
from server.tracing.trace import AttributeValue, RequestTrace


def note_queued(
    trace: RequestTrace | None, request: GenerationRequest, engine_requests: Sequence[EngineRequest], model: str
) -> None:
    """``request`` was queued as ``engine_requests``; nothing if it is not traced."""
    if trace is None:
        return
    trace.queued(
        tuple(each.request_id for each in engine_requests),
        model,
        sum(len(each.prompt_token_ids) for each in engine_requests),
        asked_for(request, engine_requests),
    )


def asked_for(request: GenerationRequest, engine_requests: Sequence[EngineRequest]) -> dict[str, AttributeValue]:
    """The seed and the length are those in force, also where the request left them open."""
    params = engine_requests[0].choices[0].params
    asked: dict[str, AttributeValue] = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": float(request.temperature),
        "gen_ai.request.top_p": float(request.top_p),
        "gen_ai.request.seed": params.seed if request.seed is None else request.seed,  # the engine's is unsigned
        "gen_ai.request.stream": request.stream,
    }
    if request.top_k > 0:
        asked["gen_ai.request.top_k"] = float(request.top_k)  # so in the conventions
    if request.frequency_penalty:
        asked["gen_ai.request.frequency_penalty"] = float(request.frequency_penalty)
    if request.presence_penalty:
        asked["gen_ai.request.presence_penalty"] = float(request.presence_penalty)
    if request.num_sampled != 1:
        asked["gen_ai.request.choice.count"] = request.num_sampled
    if len(engine_requests) > 1:
        asked["truedraft.prompts"] = len(engine_requests)
    speculation = request.speculation
    if speculation is not None and speculation.num_speculative_tokens is not None:
        asked["truedraft.speculation.requested_tokens"] = speculation.num_speculative_tokens
    return asked
