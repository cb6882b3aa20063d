"""When the requests of an open loop are due: a schedule that waits for no answer."""

from __future__ import annotations

import random


class Arrivals:
    """The arrivals of one source: Poisson (exponential gaps) or evenly spaced from a random point on.

    Several sources together are again a Poisson process, of the sum of their rates. A source that is asked late does
    not shift what comes after: each time follows from the one before, never from the clock.
    """

    def __init__(self, rate: float, kind: str, rng: random.Random, start: float) -> None:
        """``rate``: a second. Raises ValueError unless it is positive and ``kind`` is poisson or constant."""
        if not rate > 0:
            raise ValueError(f"the rate must be positive; it is {rate}")
        if kind not in ("poisson", "constant"):
            raise ValueError(f"arrivals are poisson or constant, not {kind!r}")
        self._mean = 1 / rate
        self._rng = rng
        self._poisson = kind == "poisson"
        self.next = start + (self._gap() if self._poisson else rng.random() * self._mean)

    def take(self) -> float:
        """The arrival that is due next; the one after becomes ``next``."""
        due = self.next
        self.next += self._gap()
        return due

    def _gap(self) -> float:
        return self._rng.expovariate(1 / self._mean) if self._poisson else self._mean
