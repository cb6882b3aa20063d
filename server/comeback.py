"""When a client who found no room to wait should come again.

Whoever is refused gets a place behind all who were refused before, as far away in time as it takes until so many
requests have left the queue. Told the same time they would all be back at once, and most would be refused again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_SECONDS = 60.0  # older clients of OpenAI do not wait for longer
MIN_SECONDS = 2.0  # those who came with the one that is refused are still coming
SHARE = 0.9  # of the places that become free: other clients come as well
WINDOW_SECONDS = 30.0  # in which the requests that leave the queue are counted
SAMPLE_SECONDS = 0.05
GUESS_SECONDS = 0.5  # of measuring that the guess is worth


class ComeBack:
    """``guess``: requests that leave the queue in a second, until that has been measured."""

    def __init__(self, guess: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess = guess
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (time, how many had left), oldest first
        self._last_place = clock()

    def saw(self, num_waiting: int, num_left: int) -> None:
        """So many wait, and so many have left the queue since the start. Tell it when a request comes, taken or not.

        A queue that runs empty says nothing of how fast it could move.
        """
        now = self._clock()
        if num_waiting == 0 and self._samples:
            if now - self._samples[0][0] > GUESS_SECONDS:
                self._guess = self._rate
            self._samples.clear()
        if self._samples and now - self._samples[-1][0] < SAMPLE_SECONDS:
            return
        self._samples.append((now, num_left))
        while now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()

    def seconds(self) -> float:
        """From now on, for one who is refused; at most MAX_SECONDS."""
        now = self._clock()
        place = max(self._last_place + 1 / (SHARE * self._rate), now + MIN_SECONDS)
        self._last_place = min(place, now + MAX_SECONDS)
        return self._last_place - now

    @property
    def _rate(self) -> float:
        """Requests that leave the queue in a second while it is not empty."""
        if not self._samples:
            return self._guess
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        return (after - before + self._guess * GUESS_SECONDS) / (ended - began + GUESS_SECONDS)
