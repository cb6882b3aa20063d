"""What the server knows of an engine: one in this process (scheduler.engine) or in another (scheduler.remote)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from scheduler.audit import AuditStatus
from scheduler.handle import RequestHandle
from scheduler.request import EngineRequest
from scheduler.room import Reservation, WaitingRoom
from scheduler.stats import StepRecord


class EngineInterface(Protocol):
    """All methods are for the event loop's thread.

    A request that was taken ends with an event for each of its choices, whatever happens: also if the engine dies.
    """

    on_step: Callable[[StepRecord], None] | None  # hears every record, in order; to be set before ``start``

    @property
    def healthy(self) -> bool: ...

    @property
    def unhealthy_reason(self) -> str | None:
        """One sentence, fit for a health answer; None while healthy."""

    @property
    def accepting(self) -> bool:
        """``submit`` would not refuse for the engine's own state."""

    @property
    def seconds_since_progress(self) -> float:
        """Since the last step ended or work came to an idle engine; 0 while idle. For a watchdog."""

    @property
    def oldest_arrival(self) -> float | None:
        """When the one that has waited longest of the requests of which no choice has run arrived; None without any."""

    @property
    def audit_status(self) -> AuditStatus | None:
        """None without audits."""

    def start(self) -> None:
        """Begin to work, in the running event loop. Raises RuntimeError if it was started before."""

    def check_accepting(self) -> None:
        """Raises EngineUnhealthy or ShuttingDown if the engine takes no requests."""

    @property
    def room(self) -> WaitingRoom:
        """Who waits, and who is on the way to the queue."""

    @property
    def num_ended(self) -> int:
        """Requests with a reservation that were queued and have ended since the start, in whatever way."""

    def reserve(self, num_requests: int, num_tokens: int, share: float = 1.0) -> Reservation:
        """Room for one client's request, before it is tokenized; see WaitingRoom. Raises an AdmissionError."""

    def submit(self, request: EngineRequest, reservation: Reservation | None = None) -> RequestHandle:
        """Queue ``request``, in the room reserved for it, if any.

        Raises an AdmissionError, or ValueError if it is malformed, its id is in use or too little is reserved.
        """

    def abort(self, request_id: str, error: str | None = None) -> None:
        """End a request, in any state, within a step. An unknown id does nothing."""

    async def refresh(self) -> None:
        """Bring up to date what is told of the engine between its records (``audit_status``, its speculation)."""

    async def block_map(self) -> str:
        """What each block of the KV cache is, see kvcache.block_map: a moment between two steps.

        Raises EngineUnhealthy if there is no engine to ask; what an engine's process does not do is a CallFailed.
        """

    async def shutdown(self, drain: bool = True, timeout: float = 30.0, grace: float = 5.0) -> bool:  # noqa: ASYNC109
        """Take nothing new; with ``drain`` let the requests finish for at most ``timeout`` seconds; abort the rest.

        Returns whether every request ended by itself and nothing of the engine runs any more; ``grace`` seconds are
        waited for that. May be called again.
        """

    def give_up(self, reason: str) -> None:
        """Fail every request with ``reason`` and take nothing new: unhealthy from now on, whatever the step does."""

    def dump_stacks(self) -> None:
        """Write where every thread of the engine and of this process stands to stderr."""
