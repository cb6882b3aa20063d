"""What the process that checks grammars runs: the functions of a server.worker.WorkerProcess."""

from __future__ import annotations

import threading
from collections.abc import Callable

from specdec.grammar.compiler import GrammarCompiler, GrammarError, TokenizerText

# A quarter of what the server's own threads have: what nests too deep for them dies here.
_STACK_BYTES = 2 * 2**20

_compilers: list[GrammarCompiler] = []


def load(text: TokenizerText) -> None:
    """The tokenizer that grammars are checked for, once for each process."""
    _compilers[:] = [GrammarCompiler(text)]


def loaded() -> bool:
    return bool(_compilers)


def check(grammar: str) -> None:
    """Raises GrammarError (a ValueError) if ``grammar`` cannot be compiled or allows no output."""
    compiler = _compilers[0]
    failures: list[BaseException] = []

    def compile_it() -> None:
        try:
            compiler.compile(grammar)
        except BaseException as error:
            failures.append(error)

    _on_small_stack(compile_it)
    for failure in failures:
        if isinstance(failure, (GrammarError, MemoryError)):
            raise failure
        raise RuntimeError(f"the grammar's compiler failed with {type(failure).__name__}")


def _on_small_stack(work: Callable[[], None]) -> None:
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
