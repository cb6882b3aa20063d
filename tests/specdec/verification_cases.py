"""Edge cases of verification, shared by the verifier's tests and the step's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """The target says ``target`` in turn (one token a row); the drafter said ``drafts``."""

    name: str
    drafts: tuple[int, ...]
    target: tuple[int, ...]
    emitted: tuple[int, ...]
    accepted: int
    stops: frozenset[int] = frozenset()
    tokens_left: int = 100
    finish_reason: str | None = None
    stop_token_id: int | None = None


STOP = frozenset({9})
CASES = [
    Case("no drafts is plain decoding", (), (1,), (1,), 0),
    Case("all accepted gives the bonus token", (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4), 3),
    Case("the first mismatch gives the recovered token", (1, 7, 3), (1, 2, 3, 4), (1, 2), 1),
    Case("a wrong first draft costs nothing", (7, 2, 3), (1, 2, 3, 4), (1,), 0),
    Case("a match behind a mismatch does not count", (7, 2), (1, 2, 3), (1,), 0),
    Case("an accepted stop token ends the run", (1, 9, 3), (1, 9, 3, 4), (1, 9), 2, STOP, 100, "stop", 9),
    Case("a stop token at the first row", (9, 2), (9, 2, 3), (9,), 1, STOP, 100, "stop", 9),
    Case("a recovered stop token", (1, 2), (1, 9, 3), (1, 9), 1, STOP, 100, "stop", 9),
    Case("a bonus stop token", (1, 2), (1, 2, 9), (1, 2, 9), 2, STOP, 100, "stop", 9),
    Case("a drafted stop token the target does not say", (1, 9), (1, 2, 3), (1, 2), 1, STOP),
    Case("the first of two stop tokens", (8, 9), (8, 9, 1), (8,), 1, frozenset({8, 9}), 100, "stop", 8),
    Case("the length cap cuts an accepted run", (1, 2, 3), (1, 2, 3, 4), (1, 2), 2, STOP, 2, "length"),
    Case("the length cap at the bonus token", (1, 2), (1, 2, 3), (1, 2, 3), 2, STOP, 3, "length"),
    Case("the length cap at the recovered token", (1, 7), (1, 2, 3), (1, 2), 1, STOP, 2, "length"),
    Case("one token left", (1,), (1, 2), (1,), 1, STOP, 1, "length"),
    Case("a stop token wins over the length cap at the same place", (1, 9), (1, 9, 3), (1, 9), 2, STOP, 2, "stop", 9),
    Case("a stop token behind the length cap is not seen", (1, 2, 9), (1, 2, 9, 3), (1, 2), 2, STOP, 2, "length"),
    Case("nothing may be emitted", (1,), (1, 2), (), 0, STOP, 0, "length"),
]
