"""The waiting queue: choices that could run now, were there a seat, budget and blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.choice import Choice


def _order(choice: Choice) -> tuple[int, bool, int, int]:
    """Priority first (lower first); preempted ones before new ones; then first come, first served."""
    priority, arrival, index = choice.rank
    return priority, choice.num_preemptions == 0, arrival, index


class WaitingQueue:
    """Strictly ordered: only the head may be admitted, so nobody overtakes.

    The order of a choice must not change while it is queued.
    """

    def __init__(self) -> None:
        self._choices: list[Choice] = []

    def __len__(self) -> int:
        return len(self._choices)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._choices)

    @property
    def head(self) -> Choice | None:
        return self._choices[0] if self._choices else None

    def push(self, choice: Choice) -> None:
        insort(self._choices, choice, key=_order)

    def remove(self, choice: Choice) -> None:
        """Raises ValueError if it is not queued."""
        at = bisect_left(self._choices, _order(choice), key=_order)
        if at == len(self._choices) or self._choices[at] is not choice:
            raise ValueError(f"sequence {choice.sequence.seq_id} is not waiting")
        del self._choices[at]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queue is in order and holds nobody twice."""
        orders = [_order(choice) for choice in self._choices]
        assert orders == sorted(orders), orders
        assert len(set(orders)) == len(orders), orders
