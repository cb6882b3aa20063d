"""How far a suite is, on stderr: one line that is rewritten on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR = 24
_TERMINAL_SECONDS = 0.2
_LINE_SECONDS = 15.0


class Progress:
    """Work is counted in units of one plainly decoded token; what is left is guessed from the pace so far."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._started = clock()
        self._shown = -_LINE_SECONDS
        self._width = 0
        self.total = 0.0
        self.done = 0.0

    def plan(self, units: float) -> None:
        """So much more work is to be done."""
        self.total += units

    def advance(self, units: float, text: str) -> None:
        """So much is done; ``text`` says where we are."""
        self.done += units
        now = self._clock()
        if now - self._shown < (_TERMINAL_SECONDS if self._terminal else _LINE_SECONDS):
            return
        self._shown = now
        share = min(1.0, self.done / self.total) if self.total else 0.0
        line = f"{share:4.0%} {text}{self._left(now, share)}"
        if self._terminal:
            filled = round(share * _BAR)
            self._rewrite(f"[{'#' * filled}{'.' * (_BAR - filled)}] {line}")
        else:
            print(f"truedraft: verify {line.strip()}", file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        print(f"truedraft: verify: {line}", file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._terminal and self._width:
            self._rewrite("")
            self._stream.write("\r")
            self._stream.flush()

    def _left(self, now: float, share: float) -> str:
        elapsed = now - self._started
        if share <= 0.02 or elapsed < 2.0:
            return ""
        seconds = round(elapsed * (1 - share) / share)
        return f", about {seconds // 60}:{seconds % 60:02d} left"

    def _rewrite(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)


class Silent(Progress):
    """Says nothing."""

    def advance(self, units: float, text: str) -> None:
        self.done += units

    def say(self, line: str) -> None:
        pass
