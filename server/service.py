"""What the routes work with: the engine and all that surrounds it, built by server/assemble.py and passed down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scheduler.engine import Engine
from scheduler.errors import AdmissionError, EngineUnhealthy, QueueFull, RequestTooLarge, ShuttingDown
from scheduler.request import EngineRequest
from server.audits import AuditReporter
from server.chat.template import ChatTemplate
from server.errors import APIError, bad_request, unavailable
from server.fan_in import FanIn
from server.grammars import Grammars
from server.metrics import Metrics
from server.resolve import CONTEXT_LENGTH, KV_CAPACITY, ModelFacts, Tokenizer
from server.settings import Settings
from server.tools.plan import ToolSupport
from specdec.describe import describe_drafter

_SIZE_REASONS = {CONTEXT_LENGTH: "context_length", KV_CAPACITY: "kv_capacity"}  # by the code of the answer


@dataclass(slots=True)
class Service:
    """One model behind one engine. All methods are for the event loop's thread."""

    settings: Settings
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate
    grammars: Grammars
    tools: ToolSupport
    facts: ModelFacts
    metrics: Metrics
    reporter: AuditReporter
    fingerprint: str
    created: int  # seconds since the epoch: when the model was loaded
    info: Mapping[str, Any] = field(default_factory=dict)  # for /v1/server_info: what does not change
    speculation: Callable[[], Mapping[str, Any]] = dict  # what does: see specdec.describe
    draining: bool = False

    @property
    def unready_reason(self) -> str | None:
        """Why new requests are not welcome; None if they are."""
        if not self.engine.healthy:
            return self.engine.unhealthy_reason
        if self.engine.seconds_since_progress > self.settings.stall_timeout:
            return f"no step has ended for {self.engine.seconds_since_progress:.0f} seconds"
        if self.draining or not self.engine.accepting:
            return "the server is shutting down"
        return None

    @property
    def speculation_info(self) -> dict[str, Any]:
        """For /v1/server_info: the drafters that a request may name, and what drafts and steps cost now.

        ``auto`` costs nothing by itself: it is a choice among the others.
        """
        now = self.speculation()
        costs = {drafter["name"]: drafter for drafter in now.get("drafters", ())}
        k = self.facts.num_speculative_tokens
        return {
            "num_speculative_tokens": k,
            "drafter": self.settings.drafter if k else None,
            "drafters": [costs.get(name, {"name": name, **describe_drafter(None)}) for name in self.facts.drafters],
            "step_seconds": now.get("step_seconds"),
        }

    @property
    def audit_info(self) -> dict[str, Any]:
        """For /v1/server_info: how audits are set up, and what they found since the start."""
        status, config = self.engine.scheduler.audit_status, self.engine.scheduler.config.audit
        if status is None or config is None:
            return {"rate": 0.0}
        return {
            "rate": config.rate,
            "share": config.row_share,
            "exact": config.exact,
            "near_tie": None if config.exact else config.near_tie,
            "max_waiting": config.max_waiting,
            "max_waiting_tokens": config.max_waiting_tokens,
            "store": self.reporter.store is not None,
            **asdict(status),
        }

    def check_open(self) -> None:
        """Raises APIError 503 if the server is shutting down."""
        if self.draining:
            raise self.refusal(ShuttingDown("the server is shutting down"))

    def check_admission(self, num_requests: int) -> None:
        """Raises APIError 503 if so many more would not be taken now. Before anything is tokenized."""
        self.check_open()
        try:
            self.engine.check_accepting()
            self.engine.scheduler.check_room(num_requests)
        except AdmissionError as error:
            raise self.refusal(error) from None

    def submit(self, requests: tuple[EngineRequest, ...]) -> FanIn:
        """Queue all or none. Raises APIError."""
        handles = []
        try:
            for request in requests:
                handles.append(self.engine.submit(request))
        except AdmissionError as error:
            for handle in handles:
                handle.abort()
            raise self.refusal(error) from None
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        return FanIn(handles)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an APIError that refuses a request for its size before the scheduler sees it."""
        try:
            yield
        except APIError as error:
            reason = _SIZE_REASONS.get(error.code)
            if reason is not None:
                self.metrics.reject(reason)
            raise

    def refusal(self, error: AdmissionError) -> APIError:
        """The answer to a request that was not taken; counts it."""
        self.metrics.reject(error.reason)
        match error:
            case RequestTooLarge(reason="context_length"):
                return bad_request(str(error), "prompt", CONTEXT_LENGTH)
            case RequestTooLarge():
                return bad_request(str(error), "max_tokens", KV_CAPACITY)
            case QueueFull():
                return unavailable("overloaded", str(error))
            case ShuttingDown():
                return unavailable("shutting_down", str(error), retry_after=5)
            case EngineUnhealthy():
                return unavailable("engine_failed", str(error), retry_after=10)
            case _:
                return unavailable("overloaded", str(error))
