"""The asyncio engine: schedules in the event loop, runs each step in one model thread, hands out the events."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

from scheduler.audit import AuditStatus
from scheduler.errors import EngineUnhealthy
from scheduler.handle import RequestHandle
from scheduler.isolation import joined
from scheduler.readers import MakeHandle, Readers
from scheduler.request import EngineRequest
from scheduler.retry import live_items
from scheduler.room import Reservation, WaitingRoom
from scheduler.scheduler import Scheduler
from scheduler.standing import Standing
from scheduler.stats import StepRecord
from specdec.plan import SequenceOutput, StepPlan, StepResult, StepStats

logger = logging.getLogger(__name__)

T = TypeVar("T")

BLAMELESS_FACTOR = 10
MAX_BUFFERED_BATCHES = 4096  # events of so many steps are kept for a reader who falls behind


class Step(Protocol):
    """All methods are called in the model thread alone."""

    intact: bool  # if the last ``run`` raised: whether it left every sequence and table as they were

    def run(self, plan: StepPlan) -> StepResult: ...

    def release(self, seq_id: int) -> None:
        """Forget a sequence that ended or was preempted; unknown ids are fine."""

    def check(self) -> None:
        """Do what a step does for a sequence of nobody's. Raises if that fails."""


class Engine(Standing):
    """The engine in this process (scheduler.interface): owns the model thread and the loop task.

    All methods are for the event loop's thread.

    Arrivals and aborts during a step take effect when it is over. A step that raises and changed nothing is run again
    sequence by sequence, so that only those fail that make it raise; the others' tokens are what they would have been.
    If nobody gets through, or it may have changed something, it fails the requests that were part of it, and the loop
    goes on. After ``max_consecutive_failures`` such steps in a row, or a fault of the scheduler itself, the state is
    not to be trusted: every request fails and the engine stays unhealthy. Where each of these steps left all as it
    was, and the step's own check gets through, it may be the requests (one that is sent again and again, for one): then
    it takes ten times as many. A step with audits in it is first run again without them, and steps of audits alone do
    not count.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step: Step,
        *,
        on_step: Callable[[StepRecord], None] | None = None,
        thread_init: Callable[[], None] | None = None,
        max_consecutive_failures: int = 3,
        max_buffered_batches: int = MAX_BUFFERED_BATCHES,
        make_handle: MakeHandle = RequestHandle,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_consecutive_failures < 1 or max_buffered_batches < 1:
            raise ValueError(
                f"max_consecutive_failures ({max_consecutive_failures}) and max_buffered_batches "
                f"({max_buffered_batches}) must be at least 1"
            )
        super().__init__()
        self.scheduler = scheduler
        self._step = step
        self.on_step = on_step
        self._max_failures = max_consecutive_failures
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model", initializer=thread_init)
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lookers: list[asyncio.Future[str]] = []  # who waits for a block map
        self._readers = Readers(self.abort, max_buffered_batches, make_handle)
        self._stopping = False
        self._failures = 0  # steps in a row
        self._blameless = True  # each of them left all as it was
        self._progress_time = clock()

    @property
    def seconds_since_progress(self) -> float:
        """Since the last step ended or work came to an idle engine; 0 while idle. For a watchdog."""
        return 0.0 if self._idle.is_set() else self._clock() - self._progress_time

    @property
    def oldest_arrival(self) -> float | None:
        """When the one that has waited longest of the requests of which no choice has run arrived; None without any."""
        return self.scheduler.oldest_arrival

    @property
    def audit_status(self) -> AuditStatus | None:
        """None without audits."""
        return self.scheduler.audit_status

    def start(self) -> None:
        """Start the loop task in the running event loop. Raises RuntimeError if it was started before."""
        if self._task is not None:
            raise RuntimeError("the engine was started before")
        self._task = asyncio.get_running_loop().create_task(self._loop(), name="engine")

    @property
    def room(self) -> WaitingRoom:
        """Who waits, and who is on the way to the queue."""
        return self.scheduler.room

    @property
    def num_ended(self) -> int:
        """Requests with a reservation that were queued and have ended since the start, in whatever way."""
        return self.room.num_taken - len(self._readers)

    def reserve(self, num_requests: int, num_tokens: int, share: float = 1.0) -> Reservation:
        """Room for one client's request, before it is tokenized; see WaitingRoom. Raises an AdmissionError."""
        self.check_accepting()
        return self.room.reserve(num_requests, num_tokens, share)

    def submit(self, request: EngineRequest, reservation: Reservation | None = None) -> RequestHandle:
        """Queue ``request``, in the room reserved for it, if any.

        Raises an AdmissionError (see scheduler.errors) or what ``Scheduler.add`` raises.
        """
        self.check_accepting()
        self.scheduler.add(request, reservation)
        handle = self._readers.open(request)
        self._work_came()
        return handle

    def abort(self, request_id: str, error: str | None = None) -> None:
        """End a request, in any state; its blocks are free at the latest when the step that runs is over."""
        self._readers.hand_out(self.scheduler.abort(request_id, error))
        self._work_came()

    async def refresh(self) -> None:
        """Nothing to do: what is told of this engine is always of now."""

    def give_up(self, reason: str) -> None:
        """Fail every request with ``reason`` and take nothing new: unhealthy from now on, whatever the step does."""
        self._die(reason)

    def dump_stacks(self) -> None:
        """Write where every thread of this process stands to stderr."""
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    async def block_map(self) -> str:
        """What each block of the KV cache is, see kvcache.block_map, between two steps. Raises EngineUnhealthy."""
        if self._task is None or self._task.done() or not self.healthy:
            raise EngineUnhealthy(self._unhealthy_reason or "the engine does not run")
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._lookers.append(future)
        self._wake.set()
        return await future

    async def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the model thread, between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def shutdown(self, drain: bool = True, timeout: float = 30.0, grace: float = 5.0) -> bool:  # noqa: ASYNC109
        """Take nothing new; with ``drain`` let the requests finish for at most ``timeout`` seconds; abort the rest.

        A step cannot be interrupted: it gets ``grace`` seconds to end. Returns whether every request ended by
        itself and the model thread is done. If it is not, the thread still runs: leave the process with os._exit.
        """
        self._closing = True
        self.scheduler.close_audits()
        if self._task is None:
            self._thread.shutdown(wait=False)
            return not self._readers
        drained = not self._readers
        if drain and not drained and not self._task.done():
            waiting = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait({waiting, self._task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            drained = not self._readers
        self._readers.hand_out(self.scheduler.abort_all())
        self._stopping = True
        self._wake.set()
        done, _ = await asyncio.wait({self._task}, timeout=grace)
        if not done:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        return drained and bool(done)

    def _work_came(self) -> None:
        if self._idle.is_set() and self.healthy:
            self._progress_time = self._clock()
            self._idle.clear()
        self._wake.set()

    async def _loop(self) -> None:
        try:
            while True:
                if self._lookers:
                    self._show_blocks()
                if self.scheduler.has_work:
                    await self._run_step()
                elif released := self.scheduler.take_released():
                    await self.call(partial(self._release, released))
                else:
                    if self.scheduler.has_unreported:
                        self._report(self.scheduler.take_record(None))
                    if self._stopping or not self.healthy:
                        break
                    self._wake.clear()
                    self._idle.set()
                    await self._wake.wait()
        except BaseException as error:  # not an Exception alone: nothing runs any more, whatever ended it
            if not (self._stopping and isinstance(error, asyncio.CancelledError)):
                logger.exception("the engine loop failed")
                self._die(f"the engine failed ({type(error).__name__})")
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._idle.set()
            for future in self._lookers:
                if not future.done():
                    future.set_exception(EngineUnhealthy(self._unhealthy_reason or "the engine has ended"))

    def _show_blocks(self) -> None:
        """No step runs now, so the KV cache is the scheduler's."""
        lookers, self._lookers = self._lookers, []
        waiting = [future for future in lookers if not future.done()]  # others have left
        if not waiting:
            return
        try:
            shown = self.scheduler.block_map()
        except Exception as error:  # it is only for looking at
            logger.exception("the block map failed")
            for future in waiting:
                future.set_exception(RuntimeError(f"the block map failed ({type(error).__name__})"))
            return
        for future in waiting:
            future.set_result(shown)

    async def _run_step(self) -> None:
        began = self._clock()
        plan = self.scheduler.schedule()
        if plan is None:
            return
        released = self.scheduler.take_released()
        started = self._clock()
        result, message = await self._try(plan, released)
        if result is None and (live := self.scheduler.without_audits(plan)) is not None:
            logger.warning("running the step again without its %d audits", len(plan.items) - len(live.items))
            plan = live
            forget = [*released, *(item.sequence.seq_id for item in live.items)]
            result, message = await self._try(plan, forget)
        if result is None and self._step.intact and len(live_items(plan)) == len(plan.items) > 1:
            result = await self._one_by_one(plan)
        ended = self._clock()
        events = self.scheduler.fail(plan, message or "") if result is None else self.scheduler.apply(plan, result)
        if live_items(plan):
            self._failures = self._failures + 1 if result is None else 0
            self._blameless = self._step.intact and (self._blameless or self._failures == 1)
        self._readers.hand_out(events)
        self._progress_time = self._clock()
        overhead = (started - began) + (self._progress_time - ended)
        stats = None if result is None else result.stats
        self._report(
            self.scheduler.take_record(stats, step_seconds=ended - started, overhead_seconds=overhead, error=message)
        )
        if await self._given_up():
            self._die(f"{self._failures} steps in a row failed, the last one: {message}")

    async def _given_up(self) -> bool:
        """Whether so many steps have failed that it must be the engine."""
        if self._failures < self._max_failures:
            return False
        if not self._blameless or self._failures >= BLAMELESS_FACTOR * self._max_failures:
            return True
        try:
            await self.call(self._step.check)
        except Exception:
            logger.exception("the step's own check raised")
            return True
        return False

    async def _try(self, plan: StepPlan, released: Sequence[int]) -> tuple[StepResult | None, str | None]:
        """Its result, or a message for those whom it fails."""
        try:
            return await self.call(partial(self._run, plan, released)), None
        except Exception as error:
            logger.exception("a step with %d sequences raised", len(plan.items))
            return None, f"the model step failed ({type(error).__name__})"

    async def _one_by_one(self, plan: StepPlan) -> StepResult | None:
        """The step raised and changed nothing: run each sequence by itself. Those who raise then have an error.

        None if all do, or if one leaves an unknown state: then the step as a whole has failed.
        """
        logger.warning("running the step again, each of its %d sequences by itself", len(plan.items))
        parts = []
        num_failed = 0
        for item in plan.items:
            seq_id = item.sequence.seq_id
            part, message = await self._try(StepPlan((item,)), (seq_id,))  # it may have seen drafts: it is forgotten
            if part is None:
                num_failed += 1
                if not self._step.intact:
                    return None
                part = StepResult((SequenceOutput(seq_id, error=message),), StepStats())
            parts.append(part)
            self._progress_time = self._clock()
        return None if num_failed == len(parts) else joined(parts)

    def _run(self, plan: StepPlan, released: Sequence[int]) -> StepResult:
        """In the model thread."""
        self._release(released)
        return self._step.run(plan)

    def _release(self, seq_ids: Sequence[int]) -> None:
        """In the model thread."""
        for seq_id in seq_ids:
            self._step.release(seq_id)

    def _report(self, record: StepRecord) -> None:
        if self.on_step is None:
            return
        try:
            self.on_step(record)
        except Exception:  # metrics must not stop the service
            logger.exception("on_step failed")

    def _die(self, reason: str) -> None:
        """Fail everything and take nothing new: the state cannot be trusted."""
        if self._unhealthy_reason is not None:
            return
        self._unhealthy_reason = reason
        logger.error("the engine is unhealthy: %s", reason)
        try:
            self.scheduler.close_audits("fault")
            events = self.scheduler.abort_all(reason)
        except Exception:
            logger.exception("requests could not be ended in order")
            events = []
        self._readers.hand_out(events)
        self._readers.fail(reason)
