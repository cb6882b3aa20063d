"""How likely a draft token has to be accepted for one more of them to pay: docs/ui.md has the reckoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.draft_length.cost import StepCost

Seconds = Callable[[int], float]  # of so many rows


def break_even(
    shares: Sequence[float], *, positions: int, batch: int, step: Seconds, draft_round: Seconds | None = None
) -> list[float]:
    """For positions 1 to ``positions``: the share of drafts accepted up to there at which it pays to draft so far.

    ``shares``: what that share was at the first positions, maybe fewer. Behind them it is taken to be what just pays.
    ``batch`` (>= 1) sequences draft; ``step`` tells the time of a step by its rows, ``draft_round`` what a costly
    drafter adds for each token of all sequences.
    """
    lines: list[float] = []
    tokens, seconds = 1.0, step(batch)  # of each sequence, in a step with one draft token less
    for i in range(1, positions + 1):
        more = step(batch * (i + 1)) - step(batch * i)
        if draft_round is not None:
            more += draft_round(batch)
        line = more * tokens / seconds
        lines.append(line)
        tokens += shares[i - 1] if i <= len(shares) else line
        seconds += more
    return lines


def step_curve(points: Sequence[Mapping[str, Any]] | None) -> StepCost | None:
    """Of what specdec.describe tells; None if that is no curve."""
    try:
        return StepCost([(int(point["rows"]), float(point["seconds"])) for point in points or ()])
    except ValueError:
        return None
