"""Step load: so many users, then more or fewer, to find where the server's latencies bend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from locust import LoadTestShape


class StepLoad(LoadTestShape):
    """``steps`` are numbers of users, each for ``seconds``; then the test ends. ``on_step`` is told of each one."""

    def __init__(self, steps: Sequence[int], seconds: float, on_step: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = tuple(steps)
        self._seconds = seconds
        self._on_step = on_step
        self._current: int | None = None

    def reset_time(self) -> None:
        """A test begins: with the first step again."""
        super().reset_time()  # type: ignore[no-untyped-call]
        self._current = None

    def tick(self) -> tuple[int, float] | None:
        """Users, and how many of them start or stop a second: all at once."""
        step = int(self.get_run_time() // self._seconds)  # type: ignore[no-untyped-call]
        if step >= len(self._steps):
            return None
        users = self._steps[step]
        if step != self._current:
            self._current = step
            self._on_step(users)
        return users, float(max(self._steps))
