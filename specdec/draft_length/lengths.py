"""How long each sequence's draft should be, so that the whole batch emits the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from specdec.draft_length.cost import StepCost


@dataclass(frozen=True, slots=True)
class Choice:
    lengths: tuple[int, ...]  # of each draft, 0 to its full length
    tokens: float  # that the step is expected to emit
    seconds: float  # that it is expected to take
    speedup: float  # tokens a second, over those of the same step without these drafts

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class DraftRounds:
    """Seconds of the rounds in which a costly drafter drafts, as its drafts get longer token by token.

    ``missing`` has the sequences it drafts for, and the rows that each would have in the first round beside its own.
    """

    def __init__(self, round_seconds: Callable[[int], float], missing: Mapping[int, int]) -> None:
        self._round_seconds = round_seconds
        self._missing = missing
        self._rows: list[int] = []
        self.seconds = 0.0

    def add(self, s: int, i: int) -> None:
        """Token ``i`` of sequence ``s`` is drafted too; those before it are."""
        if s not in self._missing:
            return
        if i == len(self._rows):
            self._rows.append(0)
        before = self._round_seconds(self._rows[i]) if self._rows[i] else 0.0
        self._rows[i] += 1 + (self._missing[s] if i == 0 else 0)
        self.seconds += self._round_seconds(self._rows[i]) - before


def choose_lengths(
    survivals: Seq[Seq[float]],
    *,
    rows: int,
    tokens: float,
    cost: StepCost,
    least_gain: float,
    rounds: DraftRounds | None = None,
) -> Choice:
    """``survivals[s][i]`` is the chance that the first i + 1 drafts of sequence s are all accepted (never rising in i).

    The step has ``rows`` rows and emits ``tokens`` (> 0) without drafts. A draft token adds a row and its survival to
    the tokens. Taken in the order of their survival, some prefix of all draft tokens is best, whatever the cost curve
    looks like, and a prefix of them is a prefix of every draft. Drafts that promise less than ``least_gain`` over none
    are not worth their noise. With ``rounds``, which add to the time of a draft that is not made yet, the order is the
    same, and the best prefix is only nearly the best choice.
    """
    plain = cost.seconds(rows)
    # What all of them together would bring if they took no more time than one row: mostly too little, and soon known.
    most = tokens + sum(map(sum, survivals))
    if most <= tokens * least_gain * max(1.0, cost.seconds(rows + 1) / plain):
        return Choice((0,) * len(survivals), tokens, plain, 1.0)
    order = [(-chance, i, s) for s, chances in enumerate(survivals) for i, chance in enumerate(chances)]
    order.sort()
    emitted = np.array([tokens, *(-chance for chance, _, _ in order)]).cumsum()
    seconds = cost.seconds_each(rows, len(order) + 1)
    if rounds is not None:
        for count, (_, i, s) in enumerate(order, start=1):
            rounds.add(s, i)
            seconds[count] += rounds.seconds
    rates = emitted / seconds
    best = int(rates.argmax())
    if rates[best] <= rates[0] * least_gain:
        best = 0
    lengths = [0] * len(survivals)
    for _, _, s in order[:best]:
        lengths[s] += 1
    return Choice(tuple(lengths), float(emitted[best]), float(seconds[best]), float(rates[best] / rates[0]))
