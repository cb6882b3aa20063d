"""Drafters by name, as settings and requests give them."""

from __future__ import annotations

from collections.abc import Callable

from specdec.drafters.base import Drafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.synthetic import EmptyDrafter, RandomDrafter

NOTHING = "none"  # drafts nothing

_BUILDERS: dict[str, Callable[[int], Drafter]] = {
    "ngram": lambda vocab_size: NgramDrafter(vocab_size=vocab_size),
    "random": lambda vocab_size: RandomDrafter(0, vocab_size),
    NOTHING: lambda vocab_size: EmptyDrafter(),
    "suffix": lambda vocab_size: SuffixDrafter(vocab_size=vocab_size),
}

DRAFTER_NAMES: tuple[str, ...] = tuple(_BUILDERS)  # those that need nothing but tokens
MODEL, EXIT = "model", "exit"  # those that specdec.speculation builds from models
AUTO = "auto"  # the name for several drafters, of which the best is taken
ALL_NAMES = (*DRAFTER_NAMES, MODEL, EXIT, AUTO)


def check_drafter_name(name: str) -> None:
    """Raises ValueError for a name that no setting or request can mean."""
    if name not in ALL_NAMES:
        raise ValueError(f"unknown drafter {name!r}; there are {', '.join(ALL_NAMES)}")


def make_drafter(name: str, vocab_size: int) -> Drafter:
    """A new drafter for a model whose logits rows are ``vocab_size`` wide.

    Raises ValueError for an unknown name, and for a drafter that needs more than tokens.
    """
    check_drafter_name(name)
    builder = _BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"the drafter {name} needs more than tokens")
    return builder(vocab_size)
