"""Verification: which of a sequence's drafts the target confirms, and where the sequence ends.

::

    row         0        1        2        3          k = 3 drafts
    input       last     d0       d1       d2
    target      x0       x1       x2       x3         x_i is the target's own token at row i
    accept      x0==d0   x1==d1   x2==d2   bonus

Every emitted token is the target's: the first that differs from its draft is the recovered token and the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """``token_ids`` are emitted; ``num_accepted`` of them were drafts."""

    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: str | None = None  # "stop" or "length"
    stop_token_id: int | None = None


def verify(
    drafts: Seq[int], target_token: Callable[[int], int], *, stop_token_ids: Collection[int], tokens_left: int
) -> Verdict:
    """Accept ``drafts`` while they equal the target's tokens.

    ``target_token(i)`` is called with i = 0, 1, .. in order, never beyond the last row that decides a token; it may
    take ``drafts[:i]`` as emitted. A stop token ends the sequence before the length cap does; what would follow it
    is not looked at. ``tokens_left`` is how many tokens may still be emitted; at 0 nothing is.
    """
    if tokens_left <= 0:
        return Verdict((), 0, "length")
    emitted: list[int] = []
    accepted = 0
    for row in range(len(drafts) + 1):
        token = target_token(row)
        emitted.append(token)
        matches = row < len(drafts) and token == drafts[row]
        accepted += matches
        if token in stop_token_ids:
            return Verdict(tuple(emitted), accepted, "stop", token)
        if len(emitted) == tokens_left:
            return Verdict(tuple(emitted), accepted, "length")
        if not matches:
            break
    return Verdict(tuple(emitted), accepted)
