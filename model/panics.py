"""Panics of libraries written in Rust, as errors.

They come as a BaseException that is no Exception, so no code that lets one request fail alone would catch them: they
would end the thread or the task that they pass, and with it everything that this one was for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_MODULE = "pyo3_runtime"  # where the bindings of every such library keep the class, which cannot be imported


class LibraryPanic(RuntimeError):
    """A library gave up in the middle of a call."""


def is_panic(error: BaseException) -> bool:
    return type(error).__module__ == _MODULE


def panics_as_errors(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, which raises LibraryPanic where a library panics. For whatever calls one."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            if not is_panic(error):
                raise
            raise LibraryPanic(f"a library panicked: {' '.join(str(error).split())[:300]}") from error

    return guarded
