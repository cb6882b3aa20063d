"""The compiled grammars of an engine in another process."""

from __future__ import annotations

from collections import OrderedDict

from scheduler.remote.engine import CallFailed, RemoteEngine
from specdec.grammar.compiler import GrammarError, estimated_bytes

PREPARE = "prepare grammar"  # the call that compiles one


class RemoteGrammars:
    """A server.grammars.CompiledGrammars: keeps in mind what the other side should hold, which leaves there as here.

    Where the two differ, a grammar is compiled once more than it had to be.
    """

    def __init__(self, engine: RemoteEngine, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._bytes = 0

    @property
    def memory_bytes(self) -> int:
        return self._bytes

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, grammar: str) -> bool:
        if grammar not in self._held:
            return False
        self._held.move_to_end(grammar)  # who asks is about to use it
        return True

    async def prepare(self, grammar: str) -> None:
        try:
            await self._engine.call(PREPARE, grammar)
        except CallFailed as error:
            kind, _, reason = str(error).partition(": ")
            if kind != GrammarError.__name__:
                raise
            raise GrammarError(reason) from None
        if grammar not in self._held:
            self._held[grammar] = size = estimated_bytes(grammar)
            self._bytes += size
        self._held.move_to_end(grammar)
        while self._bytes > self._max_bytes and len(self._held) > 1:
            self._bytes -= self._held.popitem(last=False)[1]
