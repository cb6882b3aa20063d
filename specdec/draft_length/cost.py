"""What a step costs as a function of its rows: measured before serving, refined by every step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

_SHARED_RATE = 0.05  # how fast the whole curve follows the steps: context, load of the machine
_POINT_RATE = 0.02  # how fast its shape does, at points that steps have often met
_FIRST_RATE = 0.5 / 3.0  # and at points that none has met: what was measured there may have met a busy machine
_KNOWN = 50.0  # steps
_TRUSTED_RATIO = 2.0  # a step that took more than twice its estimate, or less than half, says no more than that


class StepCost:
    """Seconds of a step with a number of rows: linear between measured points, and along the last slope behind them.

    The curve never falls: more rows cannot be cheaper, only measured so. Raises ValueError for points that are no
    curve.
    """

    def __init__(self, points: Seq[tuple[int, float]]) -> None:
        points = sorted(points)
        rows = [row for row, _ in points]
        if len(points) < 2 or rows[0] < 1 or len(set(rows)) != len(rows):
            raise ValueError(f"a cost curve needs two or more points with different rows from 1 on, got {points}")
        if not all(math.isfinite(seconds) and seconds > 0 for _, seconds in points):
            raise ValueError(f"a step takes some time, got {points}")
        self._rows = rows
        self._measured = [seconds for _, seconds in points]
        self._shape = [1.0] * len(points)  # corrections of single points
        self._met = [0.0] * len(points)  # steps near each point
        self._shared = 1.0
        self._curve = self._rising()

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """(rows, seconds) as they stand now."""
        return tuple((row, self._shared * seconds) for row, seconds in zip(self._rows, self._curve, strict=True))

    def seconds(self, rows: int) -> float:
        """Estimate for a step of ``rows`` (>= 0)."""
        left, weight = self._place(rows)
        low, high = self._curve[left], self._curve[left + 1]
        return self._shared * max(low + (high - low) * weight, self._curve[0])

    def seconds_each(self, first: int, count: int) -> NDArray[np.float64]:
        """Estimates for ``first``, ``first + 1``, .. rows, ``[count]``."""
        rows = np.arange(first, first + count, dtype=np.float64)
        found = np.interp(rows, self._rows, self._curve)
        slope = (self._curve[-1] - self._curve[-2]) / (self._rows[-1] - self._rows[-2])
        found += np.maximum(rows - self._rows[-1], 0.0) * slope
        return self._shared * found

    def is_known(self, rows: int) -> bool:
        """Whether steps have met the points on both sides of ``rows``; else it is what was measured at the start."""
        left, _ = self._place(rows)
        return min(self._met[left], self._met[left + 1]) >= _KNOWN

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took ``seconds``."""
        if rows < 1 or not (math.isfinite(seconds) and seconds > 0):
            return
        ratio = seconds / self.seconds(rows)
        surprise = math.log(min(max(ratio, 1.0 / _TRUSTED_RATIO), _TRUSTED_RATIO))
        self._shared *= math.exp(_SHARED_RATE * surprise)
        left, weight = self._place(rows)
        weight = min(max(weight, 0.0), 1.0)
        for point, share in ((left, 1.0 - weight), (left + 1, weight)):
            rate = max(_POINT_RATE, _FIRST_RATE / (1.0 + self._met[point] / 3.0))
            self._shape[point] *= math.exp(rate * share * surprise)
            self._met[point] += share
        self._curve = self._rising()

    def _rising(self) -> list[float]:
        curve: list[float] = []
        for seconds, factor in zip(self._measured, self._shape, strict=True):
            curve.append(max(seconds * factor, curve[-1] if curve else 0.0))
        return curve

    def _place(self, rows: int) -> tuple[int, float]:
        """Index of the point to the left, and how far ``rows`` is on the way to the next; beyond 1 behind the last."""
        left = min(max(bisect.bisect_right(self._rows, rows) - 1, 0), len(self._rows) - 2)
        return left, (rows - self._rows[left]) / (self._rows[left + 1] - self._rows[left])
