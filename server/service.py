"""What the routes work with: the engine and all that surrounds it, built by server/assemble.py and passed down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from scheduler.audit import AuditConfig
from scheduler.errors import AdmissionError, EngineUnhealthy, QueueFull, RequestTooLarge, ShuttingDown
from scheduler.interface import EngineInterface
from scheduler.request import EngineRequest
from scheduler.room import Reservation
from server.audits import AuditReporter
from server.auth.keys import NO_KEYS, ApiKeys
from server.body import BodyMemory, read_json_object
from server.chat.template import ChatTemplate
from server.comeback import NO_RETRIES, ComeBack, Retries
from server.deadline import Deadline
from server.errors import APIError, bad_request, unavailable
from server.fan_in import FanIn
from server.grammars import Grammars
from server.metrics import Metrics
from server.rate import RateLimiter, unlimited
from server.resolve import CONTEXT_LENGTH, KV_CAPACITY, ModelFacts, Tokenizer
from server.settings import Settings
from server.tools.plan import ToolSupport
from server.tracing.tracing import Tracing
from server.ui.feed import Feed
from specdec.describe import describe_drafter

MAX_TEXTS = 64  # that /tokenize and /detokenize work on at one time
T = TypeVar("T")

_SIZE_REASONS = {CONTEXT_LENGTH: "context_length", KV_CAPACITY: "kv_capacity"}  # by the code of the answer


@dataclass(slots=True)
class Service:
    """One model behind one engine. All methods are for the event loop's thread."""

    settings: Settings
    engine: EngineInterface
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
    audit: AuditConfig | None = None
    keys: ApiKeys = NO_KEYS
    limiter: RateLimiter = field(default_factory=unlimited)
    tracing: Tracing | None = None  # None: requests have no traces
    feed: Feed | None = None  # what the page and ``truedraft top`` watch; None: they are off
    draining: bool = False
    comeback: ComeBack = field(init=False)
    bodies: BodyMemory = field(init=False)
    num_texts: int = 0  # in ``counting_text``

    def __post_init__(self) -> None:
        self.comeback = ComeBack(self.settings.max_num_seqs)
        self.bodies = BodyMemory(self.settings.max_bodies_bytes, partial(self.metrics.reject, "bodies"))

    @property
    def lost_reason(self) -> str | None:
        """Why this process can only be started again; None while it works."""
        if not self.engine.healthy:
            return self.engine.unhealthy_reason
        if self.engine.seconds_since_progress > self.settings.stall_timeout:
            return f"no step has ended for {self.engine.seconds_since_progress:.0f} seconds"
        return None

    @property
    def unready_reason(self) -> str | None:
        """Why new requests are not welcome; None if they are."""
        if (lost := self.lost_reason) is not None:
            return lost
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
        status, config = self.engine.audit_status, self.audit
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

    async def read(self, request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
        """``parse`` of the request's body; see :func:`server.body.read_json_object`. Raises APIError."""
        async with self.deadline(None, request.state.arrival_time).bound():  # its own is not known yet
            return await read_json_object(
                request,
                max_bytes=self.settings.max_body_bytes,
                deadline=self.settings.body_timeout,
                memory=self.bodies,
                parse=parse,
            )

    def deadline(self, timeout: float | None, arrival_time: float) -> Deadline:
        """Of a request that asks for ``timeout`` seconds, if it does."""
        seconds = self.settings.request_timeout if timeout is None else timeout
        return Deadline(arrival_time, seconds, self.metrics.count_timeout)

    def reserve(self, num_requests: int, num_tokens: int, retries: Retries = NO_RETRIES) -> Reservation:
        """Room to wait for so many prompts, before they are tokenized. Raises APIError 503 if there is none."""
        self.check_open()
        self.comeback.saw(self.engine.room.num_requests, self.engine.num_ended)
        try:
            return self.engine.reserve(num_requests, num_tokens, self.comeback.share(retries))
        except AdmissionError as error:
            raise self.refusal(error) from None

    def correct(self, reservation: Reservation, num_tokens: int) -> None:
        """The prompts have so many tokens. Raises APIError 503 if these are more than there is room for."""
        try:
            reservation.correct(num_tokens)
        except AdmissionError as error:
            raise self.refusal(error) from None

    def submit(self, requests: tuple[EngineRequest, ...], reservation: Reservation) -> FanIn:
        """Queue all or none, in the room that was reserved for them and corrected. Raises APIError."""
        handles = []
        try:
            for request in requests:
                handles.append(self.engine.submit(request, reservation))
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
    def charged(
        self, requests: tuple[EngineRequest, ...], key: str | None, *, open_ended: bool = False
    ) -> Iterator[tuple[EngineRequest, ...]]:
        """``requests`` as those of this key: apart from other keys' in every cache, and charged to it.

        Use it around ``submit``: nothing is charged for what was not queued. ``open_ended``: no length was asked for.
        Raises APIError 429, or 400 if waiting would not help.
        """
        if key is not None and not self.settings.share_cache_between_keys:
            # A name holds no slash, so no two keys meet whatever salts they send.
            requests = tuple(replace(each, cache_salt=f"{key}/{each.cache_salt}") for each in requests)
        self.limiter.take_tokens(key, requests, open_ended=open_ended)
        try:
            yield requests
        except BaseException:
            self.limiter.give_back(requests)
            raise

    @contextlib.contextmanager
    def counting_text(self) -> Iterator[None]:
        """Around work on a text that is not for the engine. Raises APIError 503 if too many are worked on."""
        self.check_open()
        with self.counting_refusals():
            if self.num_texts >= MAX_TEXTS:
                raise unavailable("overloaded", f"{self.num_texts} texts are being tokenized", reason="texts")
            self.num_texts += 1
            try:
                yield
            finally:
                self.num_texts -= 1

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an APIError that refuses a request for its size or for want of room before the scheduler sees it, and
        makes one of an engine that ends meanwhile.
        """
        try:
            yield
        except AdmissionError as error:
            raise self.refusal(error) from None
        except APIError as error:
            reason = error.reason or _SIZE_REASONS.get(error.code)
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
                return unavailable("overloaded", str(error), wait=self.comeback.seconds)
            case ShuttingDown():
                return unavailable("shutting_down", str(error), retry_after=5)
            case EngineUnhealthy():
                return unavailable("engine_failed", str(error), retry_after=10)
            case _:
                return unavailable("overloaded", str(error))
