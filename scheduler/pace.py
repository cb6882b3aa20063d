"""How many rows a step may have while others wait for their next token."""

from __future__ import annotations

from typing import Protocol

LEAST_PROMPT_ROWS = 16  # of a step that owes some: prompts move on, whatever the bound


class Cost(Protocol):
    """What a step of so many rows takes (specdec.draft_length.cost): it never falls with more rows."""

    def seconds(self, rows: int) -> float: ...

    def observe(self, rows: int, seconds: float) -> None: ...


class StepPace:
    """Bounds the rows of steps in which prompts run beside decoding sequences, so that these keep their pace.

    Which rows run together changes no output; it decides who waits for whom.
    """

    def __init__(self, bound: float, cost: Cost) -> None:
        """``bound``: seconds that such a step may take, by ``cost``, which learns from every step."""
        if not bound > 0:
            raise ValueError(f"the bound of a step's time must be positive, got {bound}")
        self.bound = bound
        self._cost = cost

    def rows(self, num_decoding: int, most: int) -> int:
        """Rows that a step with ``num_decoding`` decoding sequences may have in all, at most ``most``.

        As many as fit into the bound, but always some for the prompts.
        """
        low = min(num_decoding + LEAST_PROMPT_ROWS, most)
        if self._cost.seconds(low) > self.bound:
            return low
        high = most + 1  # low fits, high does not or must not
        while high - low > 1:
            middle = (low + high) // 2
            if self._cost.seconds(middle) <= self.bound:
                low = middle
            else:
                high = middle
        return low

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took ``seconds``."""
        self._cost.observe(rows, seconds)
