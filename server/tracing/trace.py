"""What a trace will tell of one request, collected while it is served: plain data, a few assignments a request."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scheduler.stats import FinishedChoice
from server.tracing.parent import TraceParent

AttributeValue = str | int | float | bool | tuple[str, ...] | tuple[int, ...]


@dataclass(slots=True)
class RequestTrace:
    """For the event loop's thread until it is handed on, then for the one that makes spans of it.

    Times are time.monotonic() seconds, the clock of ChoiceTiming. Nothing here holds text of the request or the answer.
    """

    operation: str  # gen_ai.operation.name
    route: str  # the path, without what a client may add
    request_id: str  # X-Request-Id
    arrival_time: float
    parent: TraceParent | None
    trace_id: str  # 32 hexadecimal digits: the parent's, or a new one
    span_id: str  # 16
    key: str | None = None  # name of the API key
    answer_id: str | None = None  # cmpl-..., chatcmpl-...
    model: str | None = None  # that answers; with the next one, of a request that was queued
    asked: Mapping[str, AttributeValue] = field(default_factory=dict)  # what it asked for, as attributes
    num_prompt_tokens: int = 0  # each prompt's once
    finished: list[FinishedChoice] = field(default_factory=list)
    open_ids: set[str] = field(default_factory=set)  # requests of the engine with choices that have not ended
    status: int = 0  # of the response; 0: there was none
    complete: bool = False  # all of the response was sent
    end_time: float | None = None  # of the response
    on_queued: Callable[[RequestTrace], None] | None = None

    def queued(
        self, engine_ids: tuple[str, ...], model: str, num_prompt_tokens: int, asked: Mapping[str, AttributeValue]
    ) -> None:
        """The engine took the request, as these requests of its own. Call it before the event loop goes on."""
        self.open_ids.update(engine_ids)
        self.model, self.num_prompt_tokens, self.asked = model, num_prompt_tokens, asked
        if self.on_queued is not None:
            self.on_queued(self)


def new_trace_id() -> str:
    return secrets.token_hex(16)


def new_span_id() -> str:
    return secrets.token_hex(8)
