"""Starts the engine's process and waits until it is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.tokenizer import Tokenizer
from scheduler.remote.engine import Capacity, RemoteEngine
from scheduler.remote.messages import ProtocolError
from server.description import EngineDescription
from server.remote.grammars import RemoteGrammars
from server.remote.hello import Begin, HungUp, Line, Listener, Ready, Refused, say
from server.remote.process import ChildProcess
from server.settings import SECRETS, Settings
from server.start_error import StartError


@dataclass(frozen=True, slots=True)
class StartedEngine:
    """An engine in a process of its own that was not started, and what belongs to it here."""

    engine: RemoteEngine
    description: EngineDescription
    tokenizer: Tokenizer
    grammars: RemoteGrammars | None  # None if there is no structured output

    def speculation(self) -> Mapping[str, Any]:
        """See specdec.describe; as it was when it was asked for last."""
        found: Mapping[str, Any] = self.engine.told["speculation"]
        return found


def start_engine_process(settings: Settings, report: Callable[[str], None]) -> StartedEngine:
    """Load the settings' models in a process of their own; ``report`` hears how far it is. Raises StartError."""
    try:
        child = ChildProcess()
    except OSError as error:
        raise StartError(f"the engine's process cannot be started: {error.strerror}") from None
    try:
        ready = _wait_ready(child, settings, report)
        tokenizer = Tokenizer.from_folder(Path(ready.folder))
        if tokenizer is None:
            raise StartError(f"{ready.folder} holds no tokenizer any more")
    except BaseException:
        child.end()
        raise
    description = ready.description
    engine = RemoteEngine(
        child.sock, child, description.scheduler, Capacity(description.num_blocks, description.block_size)
    )
    engine.told = ready.told
    has_grammars = description.no_grammars is None
    grammars = RemoteGrammars(engine, settings.grammar_cache_memory) if has_grammars else None
    return StartedEngine(engine, description, tokenizer, grammars)


def _wait_ready(child: ChildProcess, settings: Settings, report: Callable[[str], None]) -> Ready:
    values = {**settings.model_dump(mode="json", exclude=set(SECRETS)), **dict.fromkeys(SECRETS)}
    listener = Listener(child.sock)
    try:
        say(child.sock, Begin(values))
        while True:
            match message := listener.next():
                case Line():
                    report(message.text)
                case Refused():
                    raise StartError(message.reason)
                case Ready():
                    return message
                case Begin():
                    raise ProtocolError("it says what its server has to say")
    except ProtocolError as error:
        raise StartError(f"what the engine's process says cannot be used: {error}") from None
    except (HungUp, OSError):
        code = child.wait(1.0)
        raise StartError(f"the engine's process ended before it was ready (exit code {code})") from None
