"""How often a sequence is asked for drafts that are not worth a row: less and less, but never many steps apart."""

from __future__ import annotations

MOST_SKIPPED = 7


class Pace:
    """Each draft that was not worth it doubles the steps until the next is asked for; one that was ends it.

    Under load, where nothing is verified, drafts then cost an eighth of their host time. When the text begins to repeat
    itself, or the load and with it ``most`` falls, a sequence is asked again within ``most`` calls of ``due``.
    """

    def __init__(self) -> None:
        self._waits: dict[int, tuple[int, int]] = {}  # steps to skip, and how many were to be skipped last

    def due(self, seq_id: int, most: int | None = None) -> bool:
        """Whether to ask in this step, which counts as a step; nobody waits for more than ``most`` of them."""
        left, last = self._waits.get(seq_id, (0, 0))
        left = left if most is None else min(left, most)
        if left:
            self._waits[seq_id] = (left - 1, last)
        return not left

    def decided(self, seq_id: int, *, worth: bool, most: int = MOST_SKIPPED) -> None:
        """A sequence was asked, and it was ``worth`` it or not; at most ``most`` steps are skipped then."""
        if worth or not most:
            self._waits.pop(seq_id, None)
            return
        _, last = self._waits.get(seq_id, (0, 0))
        skip = min(2 * last + 1, most)
        self._waits[seq_id] = (skip, skip)

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self._waits.pop(seq_id, None)
