"""How likely a draft is to be accepted: what its drafter expects, corrected by what became of earlier drafts.

Two corrections. Over all sequences, per drafter and tenth of its estimate (or, if it gives none, per position): do
drafts like this come true as often as it says? And per sequence: does this one accept more or less than that?

::

    estimate of the drafter -> corrected by bin -> times the sequence's factor -> product along the draft

A draft counts whether or not it was verified: the target's own tokens tell how far it would have been accepted. So a
sequence whose drafts do not pay is watched without costing a row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

NUM_BINS = 10
MAX_POSITIONS = 16
CEILING = 0.995  # no draft token is certain
FLOOR = 0.02  # less likely tokens are not worth a row, and not the time to think about it

_BIN_WEIGHT = 8.0  # observations that a drafter's own word is worth
_BIN_DECAY = 0.998
_UNSCORED_GUESS = 0.5
_SEQUENCE_WEIGHT = 3.0
_SEQUENCE_DECAY = 0.93
_LEAST_FACTOR = 0.1  # a sequence may do worse than its drafts promise; that it did better for a while was mostly luck


class _Bins:
    """Of one drafter: draft tokens that had their turn, and those that came true, by tenth or position; fading."""

    __slots__ = ("right", "tried")

    def __init__(self, size: int) -> None:
        self.tried = [0.0] * size
        self.right = [0.0] * size


@dataclass(slots=True)
class _Track:
    expected: float = 0.0
    right: float = 0.0

    @property
    def factor(self) -> float:
        ratio = (self.right + _SEQUENCE_WEIGHT) / (self.expected + _SEQUENCE_WEIGHT)
        return min(max(ratio, _LEAST_FACTOR), 1.0)


class Acceptance:
    """Deterministic: the same calls give the same estimates. Holds a few numbers a sequence and drafter."""

    def __init__(self) -> None:
        # By drafter, with its own estimates or without.
        self._bins: dict[tuple[str, bool], _Bins] = {}
        self._tracks: dict[int, dict[tuple[str, bool], _Track]] = {}

    def survivals(
        self, seq_id: int, drafter: str, length: int, cumulative: Seq[float] | None, floor: float = FLOOR
    ) -> list[float]:
        """The chance that the first 1, 2, .. ``length`` tokens of a draft are all accepted; as far as it is ``floor``.

        ``cumulative``: the drafter's own estimates of the same, if it has any.
        """
        name = (drafter, cumulative is not None)
        bins = self._bins_of(name)
        track = self._tracks.get(seq_id, {}).get(name)
        factor = 1.0 if track is None else track.factor
        chance, before, chances = 1.0, 1.0, []
        for i in range(length):
            if cumulative is None:
                own, place = _UNSCORED_GUESS, min(i, MAX_POSITIONS - 1)
            else:
                own = cumulative[i] / before if before > 0.0 else 0.0
                before = cumulative[i]
                place = min(int(own * NUM_BINS), NUM_BINS - 1)
            corrected = (bins.right[place] + _BIN_WEIGHT * own) / (bins.tried[place] + _BIN_WEIGHT)
            chance *= min(corrected * factor, CEILING)
            if chance < floor:
                break
            chances.append(chance)
        return chances

    def record(
        self, seq_id: int, drafter: str, draft: Seq[int], cumulative: Seq[float] | None, emitted: Seq[int]
    ) -> None:
        """``draft`` was proposed for a sequence, whether or not it was verified, and ``emitted`` came."""
        name = (drafter, cumulative is not None)
        bins = self._bins_of(name)
        track = self._tracks.setdefault(seq_id, {}).setdefault(name, _Track())
        before = 1.0
        for i, (token, truth) in enumerate(zip(draft, emitted, strict=False)):
            if cumulative is None:
                own, place = _UNSCORED_GUESS, min(i, MAX_POSITIONS - 1)
            else:
                own = cumulative[i] / before if before > 0.0 else 0.0
                before = cumulative[i]
                place = min(int(own * NUM_BINS), NUM_BINS - 1)
            right = token == truth
            corrected = (bins.right[place] + _BIN_WEIGHT * own) / (bins.tried[place] + _BIN_WEIGHT)
            track.expected = track.expected * _SEQUENCE_DECAY + corrected
            track.right = track.right * _SEQUENCE_DECAY + right
            bins.tried[place] = bins.tried[place] * _BIN_DECAY + 1.0
            bins.right[place] = bins.right[place] * _BIN_DECAY + right
            if not right:
                return

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._tracks.pop(seq_id, None)

    def _bins_of(self, name: tuple[str, bool]) -> _Bins:
        bins = self._bins.get(name)
        if bins is None:
            bins = self._bins[name] = _Bins(NUM_BINS if name[1] else MAX_POSITIONS)
        return bins
