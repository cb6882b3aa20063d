"""The arithmetic of the comparison: pairs, their ratios, intervals, the bar and the rule for running a cell again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BAR_MEDIAN = 0.97  # of tokens/s with the controller over those without speculation, and of TPOT without over with
BAR_LOW = 0.94  # of the interval's lower end
RERUN_FACTOR = 2  # times the pairs, once

_DRAWS = 10_000
_SEED = 20_260
_COVERAGE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the bootstrap interval (95 %) around it."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Percentile bootstrap of the median, the same for the same values. Raises ValueError without any."""
    if not values:
        raise ValueError("the median of nothing was asked for")
    sample = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    draws = np.median(sample[rng.integers(0, len(sample), size=(_DRAWS, len(sample)))], axis=1)
    tail = (1.0 - _COVERAGE) / 2.0
    low, high = np.quantile(draws, [tail, 1.0 - tail])
    return Interval(statistics.median(values), float(low), float(high))


def pair_order(number: int, mode: str) -> tuple[str, str]:
    """Who runs first in a pair: ``off`` in even ones, so that a drift of the machine's speed favours neither."""
    return ("off", mode) if number % 2 == 0 else (mode, "off")


def misses_bar(ratio: Interval) -> bool:
    """Too slow: the median below 0.97, or the interval's lower end below 0.94."""
    return ratio.median < BAR_MEDIAN or ratio.low < BAR_LOW


def bound(k: int, seconds: float, verify_seconds: float) -> float:
    """(k + 1) t(B) / t(B (k + 1)): the gain if every draft were accepted and drafting cost nothing.

    ``seconds`` is the forward of B rows, ``verify_seconds`` that of B (k + 1).
    """
    return (k + 1) * seconds / verify_seconds
