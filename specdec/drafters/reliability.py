"""Do drafts come true as often as their drafter says? Counts for whoever watches or corrects the estimates."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

NUM_BINS = 10
_OWN_WORD = 8.0  # tokens that a drafter's own estimate is worth


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Draft tokens whose estimate, given that all before them were right, lay in one tenth of [0, 1]."""

    tried: int
    predicted: float  # sum of the estimates
    right: int


class Reliability:
    """Estimate against truth, by the estimate. A token counts once all before it in its draft were right."""

    def __init__(self) -> None:
        self._tried = [0] * NUM_BINS
        self._predicted = [0.0] * NUM_BINS
        self._right = [0] * NUM_BINS

    @property
    def bins(self) -> tuple[ReliabilityBin, ...]:
        """Bin i holds estimates from i / 10 on."""
        return tuple(map(ReliabilityBin, self._tried, self._predicted, self._right))

    def corrected(self, estimate: float) -> float:
        """``estimate`` of a token, given all before it, drawn towards what became of others like it; in [0, 1]."""
        place = min(int(estimate * NUM_BINS), NUM_BINS - 1)
        return (self._right[place] + _OWN_WORD * estimate) / (self._tried[place] + _OWN_WORD)

    def record(self, token_ids: Seq[int], cumulative: Seq[float], emitted: Seq[int]) -> None:
        """A draft was proposed and ``emitted`` came, whether or not all of the draft was verified."""
        before = 1.0
        for token, probability, truth in zip(token_ids, cumulative, emitted, strict=False):
            estimate = probability / before
            place = min(int(estimate * NUM_BINS), NUM_BINS - 1)
            self._tried[place] += 1
            self._predicted[place] += estimate
            if token != truth:
                return
            self._right[place] += 1
            before = probability
