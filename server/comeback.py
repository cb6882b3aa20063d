"""When a client who found no room to wait should come again.

Whoever is refused gets a place behind all who were refused before, as far away in time as it takes until so many
requests have left the queue. Told the same time they would all be back at once, and most would be refused again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

MAX_SECONDS = 60.0  # older clients of OpenAI do not wait for longer
SHARE = 0.75  # of the places that become free: other clients come as well
WINDOW_SECONDS = 30.0  # in which the requests that leave the queue are counted
MIN_WINDOW_SECONDS = 0.25
SAMPLE_SECONDS = 0.05
SLOWEST = 0.5  # requests that count as having left in a window in which none has


class ComeBack:
    """``guess``: requests that leave the queue in a second, until that has been measured."""

    def __init__(self, guess: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = guess
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (time, how many had left), oldest first
        self._last_place = clock()

    def saw(self, num_waiting: int, num_left: int) -> None:
        """So many wait, and so many have left the queue since the start. Tell it when a request comes, taken or not.

        A queue that runs empty says nothing of how fast it could move.
        """
        now = self._clock()
        if num_waiting == 0:
            self._samples.clear()
        if self._samples and now - self._samples[-1][0] < SAMPLE_SECONDS:
            return
        self._samples.append((now, num_left))
        while now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()
        began, before = self._samples[0]
        if now - began >= MIN_WINDOW_SECONDS:
            self._rate = max(num_left - before, SLOWEST) / (now - began)

    def seconds(self) -> float:
        """From now on, for one who is refused; at most MAX_SECONDS."""
        now = self._clock()
        self._last_place = min(max(self._last_place, now) + 1 / (SHARE * self._rate), now + MAX_SECONDS)
        return self._last_place - now
