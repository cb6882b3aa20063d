"""The server's side of an engine in another process: the same to work with as the one in this process."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from scheduler.admission import check_form, check_size
from scheduler.audit import AuditStatus
from scheduler.config import SchedulerConfig
from scheduler.engine import MAX_BUFFERED_BATCHES
from scheduler.errors import AdmissionError, EngineUnhealthy, ShuttingDown
from scheduler.handle import RequestHandle
from scheduler.readers import Readers
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
    decode_from_engine,
    encode,
)
from scheduler.request import ChoiceEvent, EngineRequest
from scheduler.room import Reservation, WaitingRoom
from scheduler.standing import Standing
from scheduler.stats import StepRecord

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5  # between two messages of an engine's process, at most
SILENCE_SECONDS = 3.0  # after which one that was idle counts as stuck
REFRESH_SECONDS = 1.0  # in which it has to say how it stands; else what it said before is shown
EXIT_SECONDS = 0.5  # from when it hangs up to its exit code, at most: nothing else runs meanwhile
LAST_SECONDS = 5.0  # from the end of an engine to the end of its process
TELL = "tell"  # the call that says how the engine stands
BLOCK_MAP = "block map"  # the call for what each block of its KV cache is


class EngineProcess(Protocol):
    """The process in which the engine runs."""

    def wait(self, timeout: float) -> int | None:
        """Its exit code (negative: the signal that ended it), or None if it still runs after so many seconds."""

    def kill(self) -> None:
        """End it at once; nothing if it has ended."""

    def dump_stacks(self) -> None:
        """Have it write where its threads stand to stderr."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of a KV cache (what KVCacheManager has of it)."""

    num_blocks: int
    block_size: int

    def fits(self, num_tokens: int) -> bool:
        """Could an empty pool hold a sequence of ``num_tokens``?"""
        return -(-num_tokens // self.block_size) <= self.num_blocks


class CallFailed(Exception):
    """A function of the engine's process raised; the message is one line."""


class RemoteEngine(Standing):
    """See scheduler.interface. ``sock`` leads to the engine's process, which is ready and belongs to this object.

    Who waits is counted here, so that requests are refused without asking: what the engine said last, and what is on
    the way to it. If the process ends, hangs up or sends what is no message, every request fails and the engine stays
    unhealthy.
    """

    def __init__(
        self,
        sock: socket.socket,
        process: EngineProcess,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        on_step: Callable[[StepRecord], None] | None = None,
        max_buffered_batches: int = MAX_BUFFERED_BATCHES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.on_step = on_step
        self.told: Mapping[str, Any] = {}  # what the engine's process said of itself last
        self.room = WaitingRoom(config.max_waiting_requests, config.max_waiting_tokens, self._queued)
        self._sock = sock
        self._process = process
        self._config = config
        self._capacity = capacity
        self._clock = clock
        self._readers = Readers(self.abort, max_buffered_batches)
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # from before the connection
        self._connecting: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the other side hung up
        self._leaving: dict[str, set[int]] = {}  # aborted requests, and their choices that have not ended over there
        self._num_sent = 0  # requests
        self._on_the_way: deque[tuple[int, int]] = deque()  # (number, prompt tokens) of those it has not confirmed
        self._num_calls = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._status = Status()
        self._heard = clock()
        self._ended: bool | None = None  # whether in order

    @property
    def seconds_since_progress(self) -> float:
        """As it was said last, and the time since then: a process that is stopped or stuck says nothing."""
        if self._ended is not None or not self.healthy or self._connecting is None:
            return 0.0
        silence = self._clock() - self._heard
        if self._status.idle and not self._on_the_way:
            return silence if silence > SILENCE_SECONDS else 0.0
        return self._status.seconds_since_progress + silence

    @property
    def oldest_arrival(self) -> float | None:
        """As it was said last: whoever waited then and is not heard of again waits still."""
        if self._ended is not None or not self.healthy:
            return None
        found = self.told.get("oldest_arrival")
        return None if found is None else float(found)

    @property
    def audit_status(self) -> AuditStatus | None:
        status = self.told.get("audit")
        return None if status is None else msgspec.convert(status, AuditStatus)

    def start(self) -> None:
        if self._connecting is not None:
            raise RuntimeError("the engine was started before")
        self._heard = self._clock()
        self._connecting = asyncio.get_running_loop().create_task(self._connect(), name="engine process")

    @property
    def num_ended(self) -> int:
        """Requests with a reservation that were queued and have ended since the start, in whatever way."""
        return self.room.num_taken - len(self._readers)

    def reserve(self, num_requests: int, num_tokens: int, share: float = 1.0) -> Reservation:
        self.check_accepting()
        return self.room.reserve(num_requests, num_tokens, share)

    def submit(self, request: EngineRequest, reservation: Reservation | None = None) -> RequestHandle:
        self.check_accepting()
        check_form(request, self._leaving if request.request_id in self._leaving else self._readers)
        check_size(request, self._config, self._capacity)
        num_tokens = len(request.prompt_token_ids)
        message = encode(Submit(self._num_sent + 1, request))
        if reservation is None:
            self.room.check(1, num_tokens)
        else:
            reservation.take(num_tokens)
        if not self._on_the_way and self._status.idle:
            self._heard = self._clock()  # from now on it has something to do
        self._num_sent += 1
        self._on_the_way.append((self._num_sent, num_tokens))
        handle = self._readers.open(request)
        self._write(message)
        return handle

    def abort(self, request_id: str, error: str | None = None) -> None:
        """Its reader hears of the end at once, also if the engine's process hangs; what comes later is dropped."""
        if request_id in self._readers:
            self._send(Abort(request_id, error))
            self._leaving[request_id] = set(self._readers.end(request_id, error))

    async def call(self, name: str, argument: str = "") -> Any:
        """What the function ``name`` of the engine's process returns. Raises CallFailed, EngineUnhealthy, or
        ShuttingDown if the engine has ended in order.
        """
        if self._unhealthy_reason is not None or self._ended is not None:
            raise self._end_error()
        self._num_calls = number = self._num_calls + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(Call(number, name, argument))
            return await future
        finally:
            del self._calls[number]

    async def refresh(self) -> None:
        with contextlib.suppress(TimeoutError, AdmissionError, CallFailed):
            self.told = await asyncio.wait_for(self.call(TELL), REFRESH_SECONDS)

    async def block_map(self) -> str:
        return str(await self.call(BLOCK_MAP))

    async def shutdown(self, drain: bool = True, timeout: float = 30.0, grace: float = 5.0) -> bool:  # noqa: ASYNC109
        first = not self._closing
        self._closing = True
        if self._connecting is None:
            self.kill()
            self._sock.close()
            return not self._readers
        if first and self.healthy:
            self._send(Shutdown(drain, timeout, grace))
        if self.healthy:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), (timeout if drain else 0.0) + grace + LAST_SECONDS)
        if not self._gone.is_set():
            logger.error("the engine's process does not end; it is killed")
        code = await asyncio.to_thread(self._process.wait, LAST_SECONDS if self._gone.is_set() else 0.0)
        if code is None:
            self._ended = False
            self.kill()
            await asyncio.to_thread(self._process.wait, LAST_SECONDS)
        self._lost("the engine has ended")
        if self._transport is not None:
            self._transport.abort()
        return bool(self._ended) and self.healthy

    def give_up(self, reason: str) -> None:
        self._die(reason)

    def dump_stacks(self) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        self._process.dump_stacks()

    def kill(self) -> None:
        self._process.kill()

    # --- the connection ---

    async def _connect(self) -> None:
        connection = _Connection(self._connected, self._received, self._hung_up)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=self._sock)

    def _connected(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.writelines(self._unsent)
        self._unsent.clear()

    def _received(self, data: bytes) -> None:
        if self._unhealthy_reason is not None:
            return
        try:
            for payload in self._frames.feed(data):
                self._take(decode_from_engine(payload))
        except Exception as error:
            logger.exception("a message of the engine's process cannot be used")
            self._die(f"the engine's process sent what cannot be used ({type(error).__name__})")

    def _hung_up(self) -> None:
        if self._ended is None:
            # What a process holds is closed a moment before it can be waited for.
            code = self._process.wait(EXIT_SECONDS)
            self._die(f"the engine's process has ended{_how(code)}")
        self._gone.set()

    def _send(self, message: ToEngine) -> None:
        self._write(encode(message))

    def _write(self, message: bytes) -> None:
        if self._transport is None:
            self._unsent.append(message)
        elif not self._transport.is_closing():
            self._transport.write(message)

    def _take(self, message: FromEngine) -> None:
        match message:
            case Batch():
                self._take_batch(message)
            case Answer():
                future = self._calls.get(message.number)
                if future is None or future.done():  # nobody waits for it any more
                    return
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(CallFailed(message.error))
            case Ended():
                self._ended = message.in_order

    def _take_batch(self, batch: Batch) -> None:
        self._heard = self._clock()
        self._status = status = batch.status
        while self._on_the_way and self._on_the_way[0][0] <= status.num_received:
            self._on_the_way.popleft()
        self._readers.hand_out(self._of_readers(batch.events))
        for record in batch.records:
            self._report(record)
        if status.unhealthy_reason is not None:
            self._die(status.unhealthy_reason)

    def _of_readers(self, events: tuple[ChoiceEvent, ...]) -> Sequence[ChoiceEvent]:
        """Without those of requests that were aborted here."""
        if not self._leaving:
            return events
        for event in events:
            left = self._leaving.get(event.request_id)
            if left is not None and event.finish_reason is not None:
                left.discard(event.index)
        kept = [event for event in events if event.request_id not in self._leaving]
        for request_id in [request_id for request_id, left in self._leaving.items() if not left]:
            del self._leaving[request_id]
        return kept

    def _report(self, record: StepRecord) -> None:
        if self.on_step is None:
            return
        try:
            self.on_step(record)
        except Exception:  # metrics must not stop the service
            logger.exception("on_step failed")

    def _queued(self) -> tuple[int, int]:
        status, on_the_way = self._status, self._on_the_way
        return (
            status.num_waiting + len(on_the_way),
            status.waiting_tokens + sum(num_tokens for _, num_tokens in on_the_way),
        )

    def _die(self, reason: str) -> None:
        """Fail everything and take nothing new: the state cannot be trusted."""
        if self._unhealthy_reason is not None:
            return
        self._unhealthy_reason = reason
        logger.error("the engine is unhealthy: %s", reason)
        self._lost(reason)

    def _end_error(self) -> AdmissionError:
        """Why nobody answers a call any more."""
        if self._unhealthy_reason is not None:
            return EngineUnhealthy(self._unhealthy_reason)
        return ShuttingDown("the server is shutting down")

    def _lost(self, reason: str) -> None:
        """Nothing more comes from the other side."""
        self._status = Status()
        self._on_the_way.clear()
        self._leaving.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(self._end_error())
        self._readers.fail(reason)


def _how(code: int | None) -> str:
    """How a process ended, if that is known: its exit code as subprocess has it."""
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    with contextlib.suppress(ValueError):
        return f", by {signal.Signals(-code).name}"
    return f", by signal {-code}"


class _Connection(asyncio.Protocol):
    def __init__(
        self,
        on_connected: Callable[[asyncio.Transport], None],
        on_data: Callable[[bytes], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_connected = on_connected
        self._on_data = on_data
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._on_connected(transport)

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_lost()
