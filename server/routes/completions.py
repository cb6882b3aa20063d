"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from scheduler.request import ChoiceEvent
from server.answer import ChoiceAnswer, build_choices, choose_best, request_metrics, usage
from server.body import read_json_object
from server.errors import APIError, unavailable
from server.fan_in import FanIn
from server.resolve import ResolvedCompletion, check_limits, resolve
from server.schemas import CompletionRequest, parse_completion
from server.service import Service
from server.sse import DONE, EventStream, data_event, dump_json

logger = logging.getLogger("truedraft.completions")

# The logprobs of a longer prompt are put into words in a thread: the event loop also drives the engine.
THREAD_ABOVE_TOKENS = 256
CLIENT_CLOSED_REQUEST = 499  # nobody reads it; the log does


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()
    schema = CompletionRequest.model_json_schema()
    body = {"required": True, "content": {"application/json": {"schema": schema}}}

    @router.post("/v1/completions", tags=["completions"], openapi_extra={"requestBody": body})
    async def create_completion(request: Request) -> Response:
        """Complete a prompt, or several."""
        settings = service.settings
        parsed = await read_json_object(
            request, max_bytes=settings.max_body_bytes, deadline=settings.body_timeout, parse=parse_completion
        )
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        with service.counting_refusals():
            check_limits(parsed, service.facts, settings)
        service.check_admission(len(parsed.prompt))
        with service.counting_refusals():
            resolved = await resolve(
                parsed,
                tokenizer=service.tokenizer,
                facts=service.facts,
                request_id=completion_id,
                arrival_time=request.state.arrival_time,
            )
        if settings.log_prompts:
            logger.info("prompts %r", parsed.prompt, extra={"request_id": request.state.request_id})
        completion = _Completion(service, completion_id, parsed, resolved, service.submit(resolved.engine_requests))
        headers = {"X-Seed": str(resolved.seed)}
        if parsed.stream:
            return EventStream(
                completion.stream(), on_close=completion.abort, send_timeout=settings.send_timeout, headers=headers
            )
        try:
            answer = await _unless_disconnected(request, completion.whole)
        finally:
            completion.abort()
        if answer is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return Response(dump_json(answer), media_type="application/json", headers=headers)

    return router


async def _unless_disconnected(
    request: Request, work: Callable[[], Awaitable[dict[str, Any]]]
) -> dict[str, Any] | None:
    """The result of ``work``; None, and ``work`` cancelled, if the client leaves before."""
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Completion:
    """One answer on its way."""

    def __init__(
        self,
        service: Service,
        completion_id: str,
        request: CompletionRequest,
        resolved: ResolvedCompletion,
        events: FanIn,
    ) -> None:
        self._service = service
        self._request = request
        self._resolved = resolved
        self._events = events
        self._choices: dict[int, ChoiceAnswer] = build_choices(resolved, request, service.tokenizer)
        self._head: dict[str, Any] = {
            "id": completion_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.facts.names[0],
            "system_fingerprint": service.fingerprint,
        }

    def abort(self) -> None:
        self._events.abort()

    async def whole(self) -> dict[str, Any]:
        """The answer as one body. Raises APIError if a choice fails."""
        async for batch in self._events.events():
            for event in batch:
                _raise_if_failed(event)
                await self._take(event, keep=True)
        return {
            **self._head,
            "choices": choose_best(self._choices, self._resolved.num_sampled, self._request.n),
            "usage": usage(self._resolved, self._choices),
            "seed": self._resolved.seed,
            "metrics": request_metrics(self._choices),
        }

    async def _take(self, event: ChoiceEvent, *, keep: bool) -> dict[str, Any]:
        choice = self._choices[event.index]
        if event.prompt_logprobs is not None and len(event.prompt_logprobs) > THREAD_ABOVE_TOKENS:
            return await asyncio.to_thread(choice.take, event, keep=keep)
        return choice.take(event, keep=keep)

    async def stream(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. A failure is an event of its own, then the end."""
        options = self._request.stream_options
        with_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
        continuous = options is not None and options.continuous_usage_stats
        try:
            async for batch in self._events.events():
                chunks = []
                for event in batch:
                    _raise_if_failed(event)
                    chunk = {**self._head, "choices": [await self._take(event, keep=False)]}
                    if with_usage:
                        chunk["usage"] = usage(self._resolved, self._choices) if continuous else None
                    chunks.append(data_event(chunk))
                yield b"".join(chunks)
            if options is not None and options.include_usage:
                yield data_event(
                    {
                        **self._head,
                        "choices": [],
                        "usage": usage(self._resolved, self._choices),
                        "seed": self._resolved.seed,
                        "metrics": request_metrics(self._choices),
                    }
                )
        except APIError as error:
            yield data_event(error.body)
        except Exception:
            logger.exception("a stream failed")
            yield data_event(APIError(500, "the server failed to build the answer").body)
        yield DONE


def _raise_if_failed(event: ChoiceEvent) -> None:
    if event.finish_reason == "error":
        status = 400 if event.error_type == "invalid_request" else 500
        raise APIError(status, event.error or "the request failed")
    if event.finish_reason == "abort":
        raise unavailable("shutting_down", "the server ended the request because it is shutting down", retry_after=5)
