"""The side of the engine's process: runs an engine for a server that is at the other end of a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from scheduler.engine import Engine, Step
from scheduler.errors import AdmissionError
from scheduler.handle import RequestHandle
from scheduler.remote.engine import BLOCK_MAP, HEARTBEAT_SECONDS
from scheduler.remote.messages import (
    Abort,
    Answer,
    Batch,
    Call,
    Ended,
    FrameReader,
    FromEngine,
    Shutdown,
    Status,
    Submit,
    ToEngine,
    decode_to_engine,
    encode,
)
from scheduler.request import ChoiceEvent, EngineRequest
from scheduler.scheduler import Scheduler
from scheduler.stats import StepRecord
from specdec.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 8 * 2**20  # above it no step begins until the server has read
Function = Callable[[str], Awaitable[Any]]


class EngineHost:
    """Runs an engine for ``scheduler`` and ``step``. ``functions`` may be called by name; they return plain data.

    What one turn of the loop brings (the events of a step and its record) goes out as one message.
    """

    def __init__(self, scheduler: Scheduler, step: Step, functions: Mapping[str, Function]) -> None:
        self._flowing = threading.Event()
        self._flowing.set()
        self.engine = Engine(
            scheduler, _PacedStep(step, self._flowing), on_step=self._on_step, make_handle=self._make_handle
        )
        self._functions = {BLOCK_MAP: self._block_map, **functions}
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._events: list[ChoiceEvent] = []
        self._records: list[StepRecord] = []
        self._due = False  # a message is about to go out
        self._num_received = 0
        self._over = asyncio.Event()  # there is nobody to work for any more
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, sock: socket.socket) -> bool:
        """Start the engine and serve it until the server wants it to end (True) or has hung up (False)."""
        loop = asyncio.get_running_loop()
        self.engine.start()
        connection = _Connection(self)
        await loop.create_unix_connection(lambda: connection, sock=sock)
        self._spawn(self._beat())
        await self._over.wait()
        self._flowing.set()
        for task in self._tasks:
            task.cancel()
        if self._transport is None:
            return False
        self._transport.close()  # sends what is left
        await connection.closed.wait()
        return True

    # --- the connection ---

    def connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)

    def received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._take(decode_to_engine(payload))
        except Exception:  # nobody else sends here: whatever it is, it is not the server that this belongs to
            logger.exception("a message of the server cannot be used")
            self.lost()

    def lost(self) -> None:
        self._transport = None
        self._over.set()

    def paused(self) -> None:
        self._flowing.clear()

    def resumed(self) -> None:
        self._flowing.set()

    # --- in ---

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                self.engine.abort(message.request_id, message.error)
            case Call():
                self._spawn(self._call(message))
            case Shutdown():
                self._spawn(self._shutdown(message))

    def _submit(self, message: Submit) -> None:
        request = message.request
        self._num_received = message.number
        reservation = self.engine.room.take_over(1, len(request.prompt_token_ids))
        try:
            self.engine.submit(request, reservation)
        except AdmissionError as error:  # it has failed, or is about to end, and the server does not know yet
            self._refuse(request, str(error))
        except Exception as error:
            logger.exception("request %s cannot be queued", request.request_id)
            self._refuse(request, f"the engine could not queue the request ({type(error).__name__})")
        finally:
            reservation.release()

    def _refuse(self, request: EngineRequest, reason: str) -> None:
        self._put(
            ChoiceEvent(request.request_id, spec.index, finish_reason="error", error=reason) for spec in request.choices
        )

    async def _call(self, message: Call) -> None:
        try:
            value, error = await self._functions[message.name](message.argument), None
        except Exception as failure:
            logger.exception("the call %s failed", message.name)
            value, error = None, f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
        self._send(Answer(message.number, value, error))

    async def _block_map(self, argument: str) -> str:
        return await self.engine.block_map()

    async def _shutdown(self, message: Shutdown) -> None:
        in_order = await self.engine.shutdown(message.drain, message.timeout, message.grace)
        self._flush()
        self._send(Ended(in_order))
        self._over.set()

    # --- out ---

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._flowing.is_set():
                self._flush()

    def _make_handle(
        self, request_id: str, indices: tuple[int, ...], limit: int, abort: Callable[[], None]
    ) -> RequestHandle:
        return _Forwarding(request_id, indices, limit, abort, self._put)

    def _put(self, events: Iterable[ChoiceEvent]) -> None:
        self._events.extend(events)
        self._flush_soon()

    def _on_step(self, record: StepRecord) -> None:
        self._records.append(record)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._due = False
        events, self._events = tuple(self._events), []
        records, self._records = tuple(self._records), []
        self._send(Batch(events, records, self._status()))

    def _status(self, unhealthy_reason: str | None = None) -> Status:
        engine = self.engine
        seconds = engine.seconds_since_progress
        num_waiting, waiting_tokens = engine.room.num_requests, engine.room.num_tokens
        return Status(
            num_received=self._num_received,
            num_waiting=num_waiting,
            waiting_tokens=waiting_tokens,
            seconds_since_progress=seconds,
            idle=seconds == 0.0,
            unhealthy_reason=unhealthy_reason or engine.unhealthy_reason,
        )

    def _send(self, message: FromEngine) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            data = encode(message)
        except ValueError:
            # What was to be told is lost, and somebody waits for it: only the end of all of it is certain to be heard.
            logger.exception("the engine's results cannot be sent")
            data = encode(Batch((), (), self._status("the engine's results could not be sent")))
        self._transport.write(data)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Forwarding(RequestHandle):
    """Of a request whose reader is elsewhere: keeps nothing."""

    def __init__(
        self,
        request_id: str,
        indices: Iterable[int],
        limit: int,
        abort: Callable[[], None],
        forward: Callable[[Iterable[ChoiceEvent]], None],
    ) -> None:
        super().__init__(request_id, indices, limit, abort)
        self._forward = forward

    def put(self, batch: tuple[ChoiceEvent, ...]) -> None:
        super().put(batch)
        self._batches.clear()
        self._forward(batch)


class _PacedStep:
    """A step that does not begin while the server is too far behind: what it would bring has to be kept somewhere."""

    def __init__(self, step: Step, flowing: threading.Event) -> None:
        self.intact = True
        self._step = step
        self._flowing = flowing

    def run(self, plan: StepPlan) -> StepResult:
        self._flowing.wait()
        try:
            return self._step.run(plan)
        finally:
            self.intact = self._step.intact

    def release(self, seq_id: int) -> None:
        self._step.release(seq_id)

    def check(self) -> None:
        self._step.check()


class _Connection(asyncio.Protocol):
    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._host.connected(transport)

    def data_received(self, data: bytes) -> None:
        self._host.received(data)

    def pause_writing(self) -> None:
        self._host.paused()

    def resume_writing(self) -> None:
        self._host.resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._host.lost()
