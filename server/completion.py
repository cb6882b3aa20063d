"""One answer, from a validated body on, whole or streamed: what the HTTP routes and a replay share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from scheduler.request import ChoiceEvent
from scheduler.room import Reservation
from server.answer import Choice, build_choices, choose_best, request_metrics, usage
from server.comeback import NO_RETRIES, Retries
from server.deadline import Deadline, bound
from server.errors import APIError, unavailable
from server.fan_in import FanIn
from server.large_json import large_event
from server.one_token import TokenByToken
from server.resolve import ResolvedCompletion, build_requests, check_limits, most_prompt_tokens, resolve_prompts
from server.schemas import CompletionRequest, GenerationRequest
from server.service import Service
from server.sse import DONE, data_event
from server.tracing.asked import note_queued
from server.tracing.trace import RequestTrace

logger = logging.getLogger("truedraft.completions")

# The logprobs of a longer prompt are put into words in a thread: the event loop also drives the engine.
THREAD_ABOVE_TOKENS = 256


async def begin_completion(
    service: Service,
    request: CompletionRequest,
    completion_id: str,
    arrival_time: float,
    deadline: Deadline | None = None,
    key: str | None = None,
    trace: RequestTrace | None = None,
    retries: Retries = NO_RETRIES,
) -> Completion:
    """Check it, reserve room for it, tokenize and queue it. Raises APIError, at the latest when ``deadline`` passes.

    ``key`` names the API key that the request came with; ``trace`` hears what was queued; ``retries``: of its client.
    """
    with service.counting_refusals():
        check_limits(request, service.facts, service.settings)
    service.limiter.check_size(key, len(request.prompt) * (1 + request.num_sampled * request.max_tokens))
    with service.reserve(len(request.prompt), most_prompt_tokens(request, service.facts), retries) as reservation:
        async with bound(deadline):
            resolved = await resolve_completion(service, request, reservation, completion_id, arrival_time)
        choices = build_choices(resolved, request, service.tokenizer)
        with service.charged(resolved.engine_requests, key) as engine_requests:
            events = service.submit(engine_requests, reservation)
            note_queued(trace, request, engine_requests, service.facts.names[0])
    return Completion(
        service,
        request,
        resolved,
        events,
        choices=choices,
        answer_id=completion_id,
        kind="text_completion",
        chunk_kind="text_completion",
        deadline=deadline,
    )


async def resolve_completion(
    service: Service, request: CompletionRequest, reservation: Reservation, completion_id: str, arrival_time: float
) -> ResolvedCompletion:
    """From a body to engine requests; ``check_limits`` came before. Corrects ``reservation``. Raises APIError."""
    with service.counting_refusals():
        prompts = await resolve_prompts(request, tokenizer=service.tokenizer, facts=service.facts)
    service.correct(reservation, sum(len(prompt.token_ids) for prompt in prompts))
    with service.counting_refusals():
        return await build_requests(
            request,
            prompts,
            tokenizer=service.tokenizer,
            facts=service.facts,
            request_id=completion_id,
            arrival_time=arrival_time,
            grammar=await service.grammars.of(request),
        )


class Completion:
    """One answer on its way: take it whole or as a stream, and ``abort`` whatever happens.

    ``choices`` by the index that the engine uses; ``kind`` is the answer's ``object``, ``chunk_kind`` a chunk's. What
    is not complete when ``deadline`` passes is aborted.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        resolved: ResolvedCompletion,
        events: FanIn,
        *,
        choices: Mapping[int, Choice],
        answer_id: str,
        kind: str,
        chunk_kind: str,
        deadline: Deadline | None = None,
    ) -> None:
        self._request = request
        self._resolved = resolved
        self._events = events
        self._choices = choices
        self._chunk_kind = chunk_kind
        self._deadline = deadline
        self._num_open = len(choices)  # of which the reader has not had the end
        self._late: APIError | None = None  # the deadline passed before the end
        self._timer = None if deadline is None else deadline.call_at_end(self._expire)
        self._splitters = {index: TokenByToken() for index in choices} if request.token_by_token else {}
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": service.facts.names[0],
            "system_fingerprint": service.fingerprint,
            "seed": resolved.seed,  # in each chunk: whoever saved a stream can replay it
        }

    @property
    def seed(self) -> int:
        return self._resolved.seed

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices so far, those included that nobody has read; final after ``abort``."""
        return self._events.num_tokens

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._events.abort()

    def _expire(self) -> None:
        """In the engine it ends now, if it has not ended there; a reader who is behind gets nothing of what is left."""
        if self._deadline is not None and self._num_open > 0:
            self._late = self._deadline.passed()
            self._events.abort()

    def _raise_if_failed(self, event: ChoiceEvent) -> None:
        if self._late is not None:
            raise self._late
        if event.finish_reason == "error":
            status = 400 if event.error_type == "invalid_request" else 500
            raise APIError(status, event.error or "the request failed")
        if event.finish_reason == "abort":
            message = "the server ended the request because it is shutting down"
            raise unavailable("shutting_down", message, retry_after=5)
        if event.finish_reason is not None:
            self._num_open -= 1

    async def whole(self) -> dict[str, Any]:
        """The answer as one body. Raises APIError if a choice fails."""
        async for batch in self._events.events():
            for event in batch:
                self._raise_if_failed(event)
                await self._take(event, keep=True)
        return {
            **self._head,
            "choices": choose_best(self._choices, self._resolved.num_sampled, self._request.n),
            "usage": usage(self._resolved, self._choices),
            "metrics": request_metrics(self._choices, self._request.return_token_ids),
        }

    async def _take(self, event: ChoiceEvent, *, keep: bool) -> list[dict[str, Any]]:
        choice = self._choices[event.index]
        if event.prompt_logprobs is not None and len(event.prompt_logprobs) > THREAD_ABOVE_TOKENS:
            return await asyncio.to_thread(choice.take, event, keep=keep)
        return choice.take(event, keep=keep)

    def _parts(self, batch: Sequence[ChoiceEvent]) -> Sequence[ChoiceEvent]:
        """The events that become chunks, one after the other."""
        if not self._splitters:
            return batch
        return [part for event in batch for part in self._splitters[event.index].split(event)]

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. A failure is an event of its own, then the end."""
        options = self._request.stream_options
        with_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
        continuous = options is not None and options.continuous_usage_stats
        head = {**self._head, "object": self._chunk_kind}
        try:
            async for batch in self._events.events():
                chunks = []
                for event in self._parts(batch):
                    self._raise_if_failed(event)
                    for choice in await self._take(event, keep=False):
                        chunk = {**head, "choices": [choice]}
                        if with_usage:
                            chunk["usage"] = usage(self._resolved, self._choices) if continuous else None
                        chunks.append(data_event(chunk) if event.prompt_logprobs is None else await large_event(chunk))
                if chunks:
                    yield b"".join(chunks)
            if options is not None and options.include_usage:
                yield data_event(
                    {
                        **head,
                        "choices": [],
                        "usage": usage(self._resolved, self._choices),
                        "metrics": request_metrics(self._choices, self._request.return_token_ids),
                    }
                )
        except APIError as error:
            yield data_event(error.body)
        except Exception:
            logger.exception("a stream failed")
            yield data_event(APIError(500, "the server failed to build the answer").body)
        yield DONE
