"""Grammars of requests: checked in a process that can be killed, kept compiled, refused with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from server.errors import APIError, bad_request, unavailable
from server.output_format import wanted_format
from server.schemas import GenerationRequest
from server.worker import WorkerCrashed, WorkerError, WorkerProcess, WorkerTimeout
from specdec.grammar.check import NOT_LOADED
from specdec.grammar.compiler import MAX_GRAMMAR_BYTES, GrammarCache, GrammarError, TokenizerText

WORKER_MEMORY = 4 * 2**30  # address space: a large tokenizer and one grammar
LOAD_SECONDS = 60.0
MAX_CHECKING = 64  # requests that wait for the worker

Count = Callable[[str], None]


class CompiledGrammars(Protocol):
    """Those that the engine holds compiled, wherever it runs."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def max_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __contains__(self, grammar: str) -> bool: ...

    async def prepare(self, grammar: str) -> None:
        """Have it compiled, so that no step waits for that. Raises GrammarError, or scheduler.errors.AdmissionError if
        the engine ends.
        """


class LocalGrammars:
    """Compiled in this process, in a thread."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache

    @property
    def memory_bytes(self) -> int:
        return self._cache.memory_bytes

    @property
    def max_bytes(self) -> int:
        return self._cache.max_bytes

    def __len__(self) -> int:
        return len(self._cache)

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._cache

    async def prepare(self, grammar: str) -> None:
        await asyncio.to_thread(self._cache.matcher, grammar)


class Grammars:
    """``compiled`` are those of the engine's constraint; None, with a ``reason``, if there is no structured output.

    For the event loop's thread. ``timeout``: seconds for one grammar. ``count`` hears the
    result of each check (one of server.metrics.GRAMMAR_RESULTS); ``module`` is what checks, in a process that
    ``worker`` makes.
    """

    def __init__(
        self,
        compiled: CompiledGrammars | None,
        tokenizer: TokenizerText | None,
        *,
        reason: str | None = None,
        timeout: float = 5.0,
        count: Count = lambda result: None,
        module: str = "specdec.grammar.check",
        worker: Callable[..., WorkerProcess] = WorkerProcess,
    ) -> None:
        self._compiled = compiled
        self._tokenizer = tokenizer
        self._reason = reason
        self._timeout = timeout
        self._count = count
        self._checking = 0
        self._worker = worker(module, memory_bytes=WORKER_MEMORY)

    @property
    def info(self) -> dict[str, Any]:
        """For /v1/server_info."""
        compiled = self._compiled
        return {
            "available": compiled is not None,
            "reason": self._reason,
            "compile_timeout": self._timeout,
            "max_grammar_bytes": MAX_GRAMMAR_BYTES,
            "cached_grammars": 0 if compiled is None else len(compiled),
            "memory_bytes": 0 if compiled is None else compiled.memory_bytes,
            "max_memory_bytes": 0 if compiled is None else compiled.max_bytes,
        }

    @property
    def available(self) -> bool:
        """Whether outputs of this model can be held to a grammar."""
        return self._compiled is not None

    async def of(self, request: GenerationRequest) -> str | None:
        """``check`` of the grammar that the request's own fields hold; None for plain text. Raises APIError."""
        wanted = wanted_format(request.response_format, request.structured_outputs)
        if wanted is None or wanted.grammar is None:
            return None
        return await self.check(wanted.grammar, wanted.param, foreign=wanted.foreign)

    async def check(self, grammar: str, param: str, *, foreign: bool = False) -> str:
        """The text for ``SamplingParams.grammar``, compiled and ready. Raises APIError, which names ``param``.

        ``foreign``: it may be GBNF or EBNF, which becomes lark. 503 if too many wait for their check. Raises
        AdmissionError if the engine ends meanwhile.
        """
        if self._compiled is None or self._tokenizer is None:
            raise bad_request(
                f"{param} is not possible with this model: {self._reason}", param, "unsupported_parameter"
            )
        if not foreign and grammar in self._compiled:
            return grammar
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise bad_request(f"{param} is larger than {MAX_GRAMMAR_BYTES} bytes", param)
        if self._checking >= MAX_CHECKING:
            raise unavailable("overloaded", f"{self._checking} grammars wait to be checked", reason="grammars")
        self._checking += 1
        try:
            checked = await self._check(grammar, param, foreign)
        finally:
            self._checking -= 1
        self._count("accepted")
        try:
            await self._compiled.prepare(checked)
        except GrammarError as error:  # it could be checked, but takes more than its share in the engine
            raise bad_request(f"{param} {error}", param) from None
        return checked

    async def _check(self, grammar: str, param: str, foreign: bool) -> str:
        while True:
            try:
                checked: str = await self._worker.call("check", grammar, foreign, timeout=self._timeout)
                return checked
            except WorkerError as error:
                if str(error) != NOT_LOADED:
                    self._count("refused")
                    raise bad_request(f"{param} {error}", param) from None
            except WorkerTimeout:
                self._count("timeout")
                raise bad_request(f"{param} takes more than {self._timeout:g} s to compile", param) from None
            except WorkerCrashed:
                self._count("crashed")
                raise bad_request(f"{param} cannot be compiled: it is too large or too deep", param) from None
            try:  # a new process, its first call
                await self._worker.call("load", self._tokenizer, timeout=LOAD_SECONDS)
            except (WorkerError, WorkerTimeout, WorkerCrashed) as error:
                raise APIError(500, "the server failed to check a grammar") from error

    def close(self) -> None:
        """End the process."""
        self._worker.close()
