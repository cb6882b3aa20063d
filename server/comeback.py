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
SHARE = 0.8  # of the places that become free: other clients come as well
WINDOW_SECONDS = 30.0  # in which the requests that leave the queue are counted
SAMPLE_SECONDS = 0.05
GOLDEN = (5**0.5 - 1) / 2  # its multiples, each modulo 1, lie evenly
GUESS_SECONDS = 0.5  # of measuring that the guess is worth


class ComeBack:
    """``guess``: requests that leave the queue in a second, until that has been measured."""

    def __init__(self, guess: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess = guess
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (time, how many had left), oldest first
        self._last_place = clock()
        self._num_waiting = 0
        self._spread = 0.0

    def saw(self, num_waiting: int, num_left: int) -> None:
        """So many wait, and so many have left the queue since the start. Tell it when a request comes, taken or not.

        A queue that runs empty says nothing of how fast it could move.
        """
        now = self._clock()
        self._num_waiting = num_waiting
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
        rate = self._rate
        half_empty = now + self._num_waiting / 2 / rate
        place = max(self._last_place + 1 / (SHARE * rate), now + MIN_SECONDS, half_empty)
        if place <= now + MAX_SECONDS:
            self._last_place = place
        else:  # there are more than the longest wait has places for: spread, as the queue may turn out to be faster
            self._spread = (self._spread + GOLDEN) % 1
            place = now + MAX_SECONDS * (1 - self._spread / 2)
        return place - now

    @property
    def _rate(self) -> float:
        """Requests that leave the queue in a second while it is not empty."""
        if not self._samples:
            return self._guess
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        return (after - before + self._guess * GUESS_SECONDS) / (ended - began + GUESS_SECONDS)
