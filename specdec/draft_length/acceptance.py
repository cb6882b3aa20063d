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

_BIN_WEIGHT = 8.0  # observations that a drafter's own word is worth
_BIN_DECAY = 0.998
_UNSCORED_GUESS = 0.5
_SEQUENCE_WEIGHT = 3.0
_SEQUENCE_DECAY = 0.93
_LEAST_FACTOR, _MOST_FACTOR = 0.1, 1.3


@dataclass(slots=True)
class _Bin:
    tried: float = 0.0
    right: float = 0.0


@dataclass(slots=True)
class _Track:
    expected: float = 0.0
    right: float = 0.0

    @property
    def factor(self) -> float:
        ratio = (self.right + _SEQUENCE_WEIGHT) / (self.expected + _SEQUENCE_WEIGHT)
        return min(max(ratio, _LEAST_FACTOR), _MOST_FACTOR)


class Acceptance:
    """Deterministic: the same calls give the same estimates. Holds a few numbers a sequence and drafter."""

    def __init__(self) -> None:
        self._bins: dict[tuple[str, bool, int], _Bin] = {}
        self._tracks: dict[int, dict[tuple[str, bool], _Track]] = {}  # by drafter, with its own estimates or without

    def survivals(self, seq_id: int, drafter: str, length: int, cumulative: Seq[float] | None) -> list[float]:
        """The chance that the first 1, 2, .. ``length`` tokens of a draft are all accepted.

        ``cumulative``: the drafter's own estimates of the same, if it has any.
        """
        track = self._tracks.get(seq_id, {}).get((drafter, cumulative is not None))
        factor = 1.0 if track is None else track.factor
        chance, chances = 1.0, []
        for i, own in enumerate(_conditional(length, cumulative)):
            chance *= min(self._corrected(drafter, i, own) * factor, CEILING)
            chances.append(chance)
        return chances

    def record(
        self, seq_id: int, drafter: str, draft: Seq[int], cumulative: Seq[float] | None, emitted: Seq[int]
    ) -> None:
        """``draft`` was proposed for a sequence, whether or not it was verified, and ``emitted`` came."""
        track = self._tracks.setdefault(seq_id, {}).setdefault((drafter, cumulative is not None), _Track())
        own = _conditional(len(draft), cumulative)
        for i, (token, truth) in enumerate(zip(draft, emitted, strict=False)):
            right = token == truth
            track.expected = track.expected * _SEQUENCE_DECAY + self._corrected(drafter, i, own[i])
            track.right = track.right * _SEQUENCE_DECAY + right
            place = self._bins.setdefault(_key(drafter, i, own[i]), _Bin())
            place.tried = place.tried * _BIN_DECAY + 1.0
            place.right = place.right * _BIN_DECAY + right
            if not right:
                return

    def release(self, seq_id: int) -> None:
        self._tracks.pop(seq_id, None)

    def _corrected(self, drafter: str, position: int, own: float | None) -> float:
        place = self._bins.get(_key(drafter, position, own))
        said = _UNSCORED_GUESS if own is None else own
        if place is None:
            return said
        return (place.right + _BIN_WEIGHT * said) / (place.tried + _BIN_WEIGHT)


def _conditional(length: int, cumulative: Seq[float] | None) -> list[float | None]:
    """What the drafter says of each token, given that all before it are accepted."""
    if cumulative is None:
        return [None] * length
    before = 1.0
    own: list[float | None] = []
    for chance in cumulative[:length]:
        own.append(chance / before if before > 0 else 0.0)
        before = chance
    return own


def _key(drafter: str, position: int, own: float | None) -> tuple[str, bool, int]:
    if own is None:
        return drafter, False, min(position, MAX_POSITIONS - 1)
    return drafter, True, min(max(int(own * NUM_BINS), 0), NUM_BINS - 1)
