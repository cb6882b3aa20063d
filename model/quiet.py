"""Other people's libraries speak through our own lines only: no bars, no reports, no half sentences."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers

_LONGEST_REASON = 400  # characters


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """While the body runs, transformers logs nothing and nobody draws progress bars. Of the process, not the thread."""
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity(logging.CRITICAL + 1)
    # Some of transformers' bars ask its own switch and some do not; all of them are made here.
    bar: Any = importlib.import_module("tqdm.std").tqdm
    make = bar.__init__
    bar.__init__ = functools.partialmethod(make, disable=True)
    try:
        yield
    finally:
        bar.__init__ = make
        transformers.utils.logging.set_verbosity(verbosity)


def reason_of(error: BaseException) -> str:
    """What an error of another library says, as one line that ends with a whole word.

    The first of its lines is often a heading, so they all count. A bare word, as of a KeyError, gets the error's name.
    """
    words = str(error).split()
    if len(words) < 2:
        return " ".join([f"{type(error).__name__}:" if words else type(error).__name__, *words])[:_LONGEST_REASON]
    line = " ".join(words)
    if len(line) <= _LONGEST_REASON:
        return line
    return f"{line[: _LONGEST_REASON + 1].rsplit(' ', 1)[0][:_LONGEST_REASON]} ..."
