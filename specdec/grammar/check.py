"""What the process that checks grammars runs: the functions of a server.worker.WorkerProcess."""

from __future__ import annotations

import threading
from collections.abc import Callable

from llguidance.gbnf_to_lark import any_to_lark

from specdec.grammar.compiler import GrammarCompiler, GrammarError, TokenizerText, first_line, walk
from specdec.grammar.text import lark

NOT_LOADED = "no tokenizer was loaded"
# A quarter of what the server's own threads have: what nests too deep for them dies here.
_STACK_BYTES = 2 * 2**20
_STEPS = 8  # that a grammar has to go without giving up

_compilers: list[GrammarCompiler] = []


def load(text: TokenizerText) -> None:
    """The tokenizer that grammars are checked for, once for each process."""
    _compilers[:] = [GrammarCompiler(text)]


def check(grammar: str, foreign: bool) -> str:
    """``grammar``, which can be compiled and allows some output; else GrammarError (a ValueError).

    ``foreign``: it is lark, GBNF or EBNF as its author wrote it, and the answer is what it becomes. Raises ValueError
    NOT_LOADED before ``load``.
    """
    if not _compilers:
        raise ValueError(NOT_LOADED)
    if foreign:
        try:
            grammar = lark(any_to_lark(grammar))
        except Exception as error:  # its parser raises all sorts of things
            raise GrammarError(f"is not a grammar: {first_line(str(error))}") from error
    failures: list[BaseException] = []

    def compile_it() -> None:
        try:
            walk(_compilers[0].compile(grammar), _STEPS)
        except BaseException as error:
            failures.append(error)

    _on_small_stack(compile_it)
    for failure in failures:
        if isinstance(failure, (GrammarError, MemoryError)):
            raise failure
        raise RuntimeError(f"the compiler failed with {type(failure).__name__}")
    return grammar


def _on_small_stack(work: Callable[[], None]) -> None:
    before = threading.stack_size(_STACK_BYTES)
    try:
        thread = threading.Thread(target=work, name="grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
