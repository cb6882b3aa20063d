"""When a client who found no room to wait should come again, and for whom room is kept then.

Whoever is refused gets a place behind all who were refused before, as far away in time as it takes until so many
requests have ended. Told the same time they would all be back at once, and most would be refused again. While some are
to come back for the last time, a part of the room is for them alone.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_SECONDS = 60.0  # told more, OpenAI's clients (but for those below) do not wait: they are back within seconds
MAX_SECONDS_OF_PATIENT = 120.0  # told more, these do not come back at all
MIN_SECONDS = 2.0  # those who came with the one that is refused are still coming
SHARE = 0.8  # of the places that become free: other clients come as well
WINDOW_SECONDS = 30.0  # in which the requests that end are counted
SAMPLE_SECONDS = 0.05
GOLDEN = (5**0.5 - 1) / 2  # its multiples, each modulo 1, lie evenly
GUESS_SECONDS = 0.5  # that have to be measured before a queue that runs empty makes a new guess

GUESSED_ROUNDS = 1.5  # times in a second that a seat becomes free, until it has been measured
# How much of a round the guess is worth. It is wrong by a factor of a hundred for requests of ten seconds, and whom it
# sends back too soon has one try less; without ends it has to fall as fast as time goes by.
GUESS_WEIGHT = 1 / 6

KEPT_SHARE = 0.25  # of the room, for those who come for the last time
LATE_SECONDS = 5.0  # that they may come late

LAST_RETRY = 2  # of OpenAI's clients, unless they are told otherwise
_PATIENT_SINCE = (2, 52)  # OpenAI's client for Python
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})\.")
_COUNT = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class Retries:
    """Those that the client of a request has made for it, and the most seconds that it waits for the next."""

    num_made: int = 0
    longest_wait: float = MAX_SECONDS


NO_RETRIES = Retries()


def read_retries(headers: Mapping[str, str]) -> Retries:
    """What OpenAI's clients say of themselves, and whoever else says it. Names of headers in lower case."""
    count = headers.get("x-stainless-retry-count", "")
    num_made = int(count) if _COUNT.fullmatch(count) else 0
    version = _VERSION.match(headers.get("x-stainless-package-version", ""))
    patient = version is not None and (int(version[1]), int(version[2])) >= _PATIENT_SINCE
    if patient and headers.get("x-stainless-lang") == "python":
        return Retries(num_made, MAX_SECONDS_OF_PATIENT)
    return Retries(num_made)


class ComeBack:
    """``seats``: requests that run at once."""

    def __init__(self, seats: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._weight = GUESS_WEIGHT * seats
        self._guess = GUESSED_ROUNDS * seats  # requests that end in a second
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()  # (time, how many had ended), oldest first
        self._last_place = clock()
        self._num_waiting = 0
        self._spread = 0.0
        self._last_try = -math.inf  # when the last of those is back who were told so for the last time

    def saw(self, num_waiting: int, num_ended: int) -> None:
        """So many wait, and so many have ended since the start. Tell it when a request comes, taken or not.

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
        self._samples.append((now, num_ended))
        while now - self._samples[0][0] > WINDOW_SECONDS:
            self._samples.popleft()

    def share(self, retries: Retries = NO_RETRIES) -> float:
        """Of the room to wait, that such a client may find filled at most."""
        kept = self._clock() <= self._last_try + LATE_SECONDS
        return 1 - KEPT_SHARE if kept and retries.num_made < LAST_RETRY else 1.0

    def seconds(self, retries: Retries = NO_RETRIES) -> float:
        """From now on, for one who is refused."""
        now, longest = self._clock(), retries.longest_wait
        rate = self._rate
        half_empty = now + self._num_waiting / 2 / rate
        place = max(self._last_place + 1 / (SHARE * rate), now + MIN_SECONDS, half_empty)
        if place <= now + longest:
            self._last_place = place
        else:  # there are more than the longest wait has places for: spread, as the queue may turn out to be faster
            self._spread = (self._spread + GOLDEN) % 1
            place = now + longest * (1 - self._spread / 2)
        if retries.num_made == LAST_RETRY - 1:
            self._last_try = max(self._last_try, place)
        return place - now

    @property
    def _rate(self) -> float:
        """Requests that end in a second while others wait."""
        if not self._samples:
            return self._guess
        (began, before), (ended, after) = self._samples[0], self._samples[-1]
        return (after - before + self._weight) / (ended - began + self._weight / self._guess)
