"""What runs in the engine's process: models, scheduler and step, and an engine for the server at the socket."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from model.children import end_all_children
from model.errors import ModelError
from model.source_error import ModelSourceError
from scheduler.remote.engine import TELL
from scheduler.remote.host import EngineHost, Function
from server.ending import Ended, ended_by_signals
from server.engine import BuiltEngine, build_engine, open_models
from server.heap import settle
from server.log_queue import flush_log
from server.logs import configure_logging
from server.remote.grammars import PREPARE
from server.remote.hello import Begin, Line, Listener, Ready, Refused, say
from server.remote.process import STACKS_SIGNAL
from server.settings import Settings, load_settings
from server.start_error import StartError


def main(descriptor: int) -> None:
    """``descriptor``: of the socket."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would be as large as the model
    sock = socket.socket(fileno=descriptor)
    begin = Listener(sock).next()
    assert isinstance(begin, Begin), begin
    settings = load_settings(begin.settings)
    configure_logging(settings.log_level, settings.log_format)
    with ended_by_signals(lambda line: None, end_all_children) as tell_end:
        try:
            built = _build_or_refuse(settings, sock)
        except Ended as ended:
            sys.exit(tell_end(ended.number))
    if built is None:
        _leave(1)
    for number in (signal.SIGTERM, signal.SIGINT):  # when to end is for the server to say
        signal.signal(number, _ignore)
    settle()
    in_order = asyncio.run(EngineHost(built.scheduler, built.step, functions(built)).run(sock))
    _leave(0 if in_order else 1)  # a step may still run


def _build_or_refuse(settings: Settings, sock: socket.socket) -> BuiltEngine | None:
    """None: the server was told why not, and may end this process from now on."""
    try:
        return _build(settings, sock)
    except (StartError, ModelError, ModelSourceError) as error:
        say(sock, Refused(str(error)))
        return None


def _leave(code: int) -> NoReturn:
    flush_log()
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no stderr
        sys.stderr.flush()
    os._exit(code)


def _build(settings: Settings, sock: socket.socket) -> BuiltEngine:
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    opened = open_models(settings, lambda line: say(sock, Line(line)))
    names = settings.served_model_name or (opened.loaded.info.name,)
    built = build_engine(settings, opened.loaded, names, opened.draft)
    say(sock, Ready(built.description, str(opened.folder), tell(built)))
    return built


def functions(built: BuiltEngine) -> dict[str, Function]:
    """What the server may call by name."""

    async def _tell(argument: str) -> dict[str, Any]:
        return tell(built)

    async def prepare(grammar: str) -> None:
        assert built.grammars is not None
        await asyncio.to_thread(partial(built.grammars.matcher, grammar))

    return {TELL: _tell, PREPARE: prepare}


def tell(built: BuiltEngine) -> dict[str, Any]:
    """How the engine stands now, beyond its records: plain data."""
    status = built.scheduler.audit_status
    return {
        "audit": None if status is None else asdict(status),
        "speculation": dict(built.speculation()),
        "oldest_arrival": built.scheduler.oldest_arrival,
    }


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which would go on to whatever is started from here."""
