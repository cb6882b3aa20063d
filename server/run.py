"""Runs the application on a port, from the start-up line to the drained end."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn
from starlette.types import ASGIApp

from server.app import create_app
from server.assemble import Report, StartError
from server.connections import KEEP_ALIVE_SECONDS, BoundedProtocol, allow_connections, http_protocol
from server.heap import settle
from server.log_queue import flush_log
from server.service import Service
from server.settings import Settings
from server.tls import tls_options, uses_tls
from server.watchdog import Watchdog

logger = logging.getLogger("truedraft.run")

FLUSH_SECONDS = 5  # for answers that are written already but not sent yet
WATCHER_SECONDS = 0.5  # in which who watches sees the end of a server that ends
WATCH_SECONDS = 1.0
LAST_ANSWERS_SECONDS = 2.0  # /health says 503 for so long before a failed process ends
ENGINE_SECONDS = 5.0  # for the step that runs when the engine is to end
TIMER_SECONDS = 5.0  # that the runtime's own timer leaves the watchdog to act first
END_SECONDS = 15.0  # for what follows when all requests have ended: flushing, closing, joining threads
WRITE_SECONDS = 2.0  # for what is written to stderr, while it may be that nobody reads
MOST_SECONDS = 1e9  # that the runtime's timer takes, and more than anybody waits
MAX_HEADER_BYTES = 64 * 1024


def bind(settings: Settings) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the model is loaded. Raises StartError."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise StartError(f"cannot listen on {where}: the host cannot be resolved ({error})") from error
    sock = socket.socket(family, kind, proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _cannot_listen(where, error) from error
    return sock


def _cannot_listen(where: str, error: OSError) -> StartError:
    reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return StartError(f"cannot listen on {where}: {reason}")


def run(
    service: Service, sock: socket.socket, report: Report, build_app: Callable[[Service], ASGIApp] = create_app
) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises StartError if the port was taken meanwhile.

    0: a signal, whether or not all requests ended in time. 1: the engine failed, or something is frozen, or there was a
    second signal; the process is then left without cleaning up, wherever its threads stand. In any case it is left
    ``END_SECONDS`` after it began to end.
    """
    allow_connections(service.settings.max_connections)
    try:
        # Two servers that load at the same time may both have bound the port; only one may listen.
        sock.listen(2048)
    except OSError as error:
        raise _cannot_listen(f"{service.settings.host}:{service.settings.port}", error) from error
    runner = _Runner(service, sock, report, build_app(service))
    settle()
    code = asyncio.run(runner.run())
    if not (runner.ended_in_order and _flushed()):
        _leave(code)
    return code


class _Server(uvicorn.Server):
    """Signals are the runner's: uvicorn would close the port at once, and a client would see no 503."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers that are written have FLUSH_SECONDS; who only watches, as long as it takes to tell them the end."""
        asyncio.get_running_loop().call_later(WATCHER_SECONDS, self._drop_watchers)
        await super().shutdown(sockets)

    def _drop_watchers(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedProtocol):
                connection.drop_watcher()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Runner:
    def __init__(self, service: Service, sock: socket.socket, report: Report, app: ASGIApp) -> None:
        self._service = service
        self._sock = sock
        self._tell = report
        self._exit_code = 0
        self.ended_in_order = True  # False: the model thread may still run
        self._num_signals = 0
        limit = service.settings.stall_timeout
        self._watch_seconds = min(WATCH_SECONDS, limit / 4)  # several beats fit into the limit
        self._watchdog = Watchdog(
            limit=limit,
            on_frozen=self._on_frozen,
            on_tick=partial(_arm_timer, limit + TIMER_SECONDS),
            every=self._watch_seconds,
        )
        self._draining: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                http=http_protocol(service.settings),  # h11: bounds the headers; the alternatives do not
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=FLUSH_SECONDS,
                **tls_options(service.settings),
            ),
            self._announce,
        )

    def _report(self, line: str) -> None:
        _in_time(partial(self._tell, line))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
            # Beside the loop's own, which a frozen loop would never call.
            signal.signal(number, self._count_signal)
        self._watchdog.start()
        watching = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._sock])
            if not self._server.started:
                self._exit_code = 1  # the application did not start, and has said why
        finally:
            watching.cancel()
            self._watchdog.end_within(END_SECONDS)
            self._watchdog.loop_ended()
        return self._exit_code

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._watchdog.end_within(self._service.settings.shutdown_timeout + ENGINE_SECONDS + END_SECONDS)
            return
        self._report("ending at once")
        _leave(1)

    def _on_signal(self) -> None:
        if self._draining is not None:
            return
        self._service.draining = True
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        seconds = self._service.settings.shutdown_timeout
        self._report(f"shutting down; running requests have {seconds:g} seconds (a second signal ends at once)")
        self.ended_in_order = await self._service.engine.shutdown(drain=True, timeout=seconds)
        self._server.should_exit = True

    def _announce(self) -> None:
        info, facts = self._service.info, self._service.facts
        host, port = self._sock.getsockname()[:2]
        quantization = info["model"]["quantization"]
        dtype = info["model"]["dtype"] + ("" if quantization == "none" else f" with {quantization} weights")
        shown = f"[{host}]" if ":" in host else host
        self._report(
            f"serving {facts.names[0]} ({dtype}, {info['model']['device']}, {info['executor']}), "
            f"{info['exactness']['summary']}, {info['kv_cache']['num_blocks']} KV blocks of "
            f"{info['kv_cache']['block_size']} tokens, up to {facts.num_speculative_tokens} drafts a step, "
            f"on {'https' if uses_tls(self._service.settings) else 'http'}://{shown}:{port}"
        )
        if not self._service.keys:
            logger.info("there are no API keys: whoever reaches this port may use the server")

    async def _watch(self) -> None:
        """End the process when the engine cannot go on: whoever started it can start it again."""
        engine, limit = self._service.engine, self._service.settings.stall_timeout
        while True:
            self._watchdog.beat()
            if engine.healthy and engine.seconds_since_progress > limit:
                reason = f"no step has ended for {limit:g} seconds"
                self._report(f"{reason}; the threads are:")
                _in_time(engine.dump_stacks)
                self.ended_in_order = False  # the step may never end
                engine.give_up(reason)
            if not engine.healthy and not self._exit_code:
                self._report(f"the engine failed: {engine.unhealthy_reason}")
                self._exit_code = 1
                self._watchdog.end_within(LAST_ANSWERS_SECONDS + ENGINE_SECONDS + END_SECONDS)
                asyncio.get_running_loop().call_later(LAST_ANSWERS_SECONDS, self._end)
            await asyncio.sleep(self._watch_seconds)

    def _end(self) -> None:
        self._server.should_exit = True

    def _on_frozen(self, reason: str) -> None:
        """In the watchdog's thread."""
        self._report(f"{reason}; the threads are:")
        _in_time(partial(faulthandler.dump_traceback, file=sys.stderr, all_threads=True))
        _leave(1)


def _arm_timer(seconds: float) -> None:
    """Unless armed again before, it ends the process with the stacks and exit code 1, whoever holds the interpreter."""
    with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):  # stderr is closed
        faulthandler.dump_traceback_later(min(seconds, MOST_SECONDS), exit=True, file=sys.stderr)


def _flushed() -> bool:
    """What was written has gone out. If it cannot, the interpreter's end would fail, with an exit code of its own."""

    def flush() -> None:
        flush_log()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # it was closed before the start
                stream.flush()

    return _in_time(flush)


def _in_time(write: Callable[[], object]) -> bool:
    """Whether it was written soon: to a pipe that nobody reads a write never returns, and nothing may wait for it.

    Its thread is started as plainly as can be: a signal may have interrupted whoever was starting one.
    """
    over = _thread.allocate_lock()
    written: list[bool] = []

    def call() -> None:
        try:
            write()
            written.append(True)
        except (OSError, RuntimeError, ValueError):  # nobody reads, a signal has interrupted a write, it is closed
            pass
        finally:
            over.release()

    over.acquire()
    _thread.start_new_thread(call, ())
    over.acquire(timeout=WRITE_SECONDS)
    return bool(written)


def _leave(code: int) -> NoReturn:
    """Without waiting for the model thread, which a step may hold."""
    try:
        _flushed()
    finally:
        os._exit(code)
