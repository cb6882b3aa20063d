"""How often the same kind of line may be logged: some at once, then so many a minute."""

from __future__ import annotations

from collections.abc import Callable


class LineLimit:
    """A bucket of ``burst`` lines that fills up by ``per_minute``. ``clock`` gives seconds."""

    def __init__(self, burst: int, per_minute: float, clock: Callable[[], float]) -> None:
        self._burst = burst
        self._per_second = per_minute / 60.0
        self._clock = clock
        self._lines = float(burst)
        self._filled = clock()
        self._last_taken = self._filled
        self.num_left_out = 0  # since the last line

    def take(self) -> int | None:
        """Ask for a line: how many were left out before it, or None if this one is left out too."""
        now = self._clock()
        self._lines = min(float(self._burst), self._lines + (now - self._filled) * self._per_second)
        self._filled = now
        if self._lines < 1.0:
            self.num_left_out += 1
            return None
        self._lines -= 1.0
        self._last_taken = now
        left_out, self.num_left_out = self.num_left_out, 0
        return left_out

    def take_left_out(self, quiet_seconds: float = 0.0) -> int:
        """How many were left out, if no line came for so long that would have said it; 0 if none were."""
        if not self.num_left_out or self._clock() - self._last_taken < quiet_seconds:
            return 0
        left_out, self.num_left_out = self.num_left_out, 0
        self._last_taken = self._clock()
        return left_out
