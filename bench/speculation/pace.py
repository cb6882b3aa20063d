"""How long things take, and how many pairs fit into the time there is. Looks at the clock only, never at a result."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Estimates are scaled by how long the runs so far took. ``limit``: seconds in all; None: no limit."""

    def __init__(self, limit: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._limit = limit
        self._estimated = self._taken = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def observe(self, estimated: float, taken: float) -> None:
        """A run that was to take ``estimated`` seconds took ``taken``."""
        self._estimated += estimated
        self._taken += taken

    def expected(self, estimated: float) -> float:
        """Seconds that work of this estimate should take."""
        return estimated * self._taken / self._estimated if self._estimated > 0 else estimated

    def fits(self, estimated: float) -> bool:
        """Is there time for it?"""
        return self._limit is None or self.expected(estimated) <= self._limit - self.elapsed

    def pairs(self, this: float, rest: float, *, wanted: int, least: int) -> int:
        """Pairs for one cell: as many as every cell could have, ``least`` to ``wanted``; 0 if not even those fit.

        ``this``: a pair of this cell by estimate; ``rest``: a pair of each cell that is left, this one included.
        """
        if self._limit is None:
            return wanted
        affordable = int((self._limit - self.elapsed) / self.expected(rest)) if rest > 0 else wanted
        pairs = min(wanted, max(least, affordable))
        return pairs if self.fits(this * pairs) else 0
