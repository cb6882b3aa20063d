"""The numbers behind the metrics, as plain as a step record: no lock, as only the event loop's thread touches them."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from server.metrics.kinds import Metric

logger = logging.getLogger("truedraft.metrics")


class Counter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount


class Gauge:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value


class Histogram:
    """``counts[i]``: values in ``(bounds[i - 1], bounds[i]]``; the last count has those above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Watched:
    """A counter or gauge that is asked for when somebody reads the metrics."""

    __slots__ = ("_failed", "_read")

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._failed = False

    @property
    def value(self) -> float:
        """NaN if it cannot be read: the other metrics are read all the same."""
        try:
            return float(self._read())
        except Exception:
            if not self._failed:
                self._failed = True  # one line, not one every few seconds
                logger.exception("a metric cannot be read")
            return math.nan


Cell = Counter | Gauge | Histogram | Watched


@dataclass(frozen=True, slots=True)
class Family:
    """One metric and its series, by the values of its labels in their order."""

    metric: Metric
    series: dict[tuple[str, ...], Cell] = field(default_factory=dict)
