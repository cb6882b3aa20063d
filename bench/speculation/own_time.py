"""A clock that runs only while its owner does, so that two can take turns and neither is charged for the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OwnTime:
    """Called, it gives the seconds spent in ``running`` blocks so far, the one that is open included."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spent = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._spent if self._since is None else self._spent + self._clock() - self._since

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time counts in here. Not to be nested."""
        assert self._since is None, "it runs already"
        self._since = self._clock()
        try:
            yield
        finally:
            self._spent = self()
            self._since = None
