"""A panic of a library fails the call in which it happens, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from model.panics import LibraryPanic, panics_as_errors
from model.tokenizer import Tokenizer
from specdec.grammar.compiler import GrammarCache
from specdec.grammar.constraint import GrammarConstraint
from specdec.params import SamplingParams
from specdec.sequence import Sequence
from tests.model.test_tokenizer import byte_level

Panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})  # as the bindings make theirs


class Panicking:
    """A library of which every call panics."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        def panic(*args: object, **kwargs: object) -> None:
            raise Panic("index out of bounds\nat 0xdeadbeef")

        return panic


def raising(error: BaseException) -> None:
    raise error


def test_only_a_panic_becomes_an_error() -> None:
    guarded = panics_as_errors(raising)
    with pytest.raises(LibraryPanic, match="panicked: index out of bounds"):
        guarded(Panic("index out of bounds"))
    for error in (ValueError("x"), KeyboardInterrupt(), SystemExit(3), MemoryError()):
        with pytest.raises(type(error)) as caught:
            guarded(error)
        assert caught.value is error
    assert issubclass(LibraryPanic, Exception)


CALLS: dict[str, Callable[[Tokenizer], object]] = {
    "encode": lambda tokenizer: tokenizer.encode("a"),
    "encode_many": lambda tokenizer: tokenizer.encode_many(["a"]),
    "encode_ordinary": lambda tokenizer: tokenizer.encode_ordinary(["a"]),
    "decode": lambda tokenizer: tokenizer.decode([1]),
    "decode_many": lambda tokenizer: tokenizer.decode_many([[1]]),
    "token_piece": lambda tokenizer: tokenizer.token_piece(1),
    "token_bytes": lambda tokenizer: tokenizer.token_bytes(1),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tokenizer_that_panics_raises_an_error(name: str) -> None:
    tokenizer = byte_level()
    tokenizer._rust = Panicking()
    tokenizer.__dict__["_plain"] = Panicking()
    with pytest.raises(LibraryPanic):
        CALLS[name](tokenizer)


@pytest.mark.parametrize("ask", ["mask", "num_allowed", "forced"])
def test_a_grammar_library_that_panics_raises_an_error(ask: str) -> None:
    class Cache(GrammarCache):
        def __init__(self) -> None:
            pass

        def matcher(self, grammar: str, *, anew: bool = False) -> Any:
            return Panicking()

    constraint = GrammarConstraint(Cache())
    sequence = Sequence(0, [1], SamplingParams(seed=0, grammar="start: /a/"), table=None)  # type: ignore[arg-type]
    argument = 3 if ask == "forced" else (1,)
    with pytest.raises(LibraryPanic):
        getattr(constraint, ask)(sequence, argument)
    constraint.release(0)
