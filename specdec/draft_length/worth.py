"""Whether asking for drafts pays at all: one account of what they bring and cost, the host's time included."""

from __future__ import annotations

MOST_SKIPPED = 7
_LIMIT = 0.3  # of a step: what is remembered of gains and of losses, so that neither outlasts what it came from
_TOLERATED = 0.003  # of a step: so much may be lost to find out


class Worth:
    """While the account is overdrawn, nobody is asked for drafts but in every second, fourth, .. eighth step.

    Drafts may pay each by itself, and yet not for the many askings that brought none: in a large batch a row costs
    nearly as much as a token is worth, so that little is gained when one comes true, while the host drafts for all.
    Since the account holds no more than a part of the present step, a few good drafts fill it again, and where the load
    falls, and a token is worth more, one does.
    """

    def __init__(self) -> None:
        self._balance = 0.0
        self._left = 0  # steps to skip
        self._last = 0  # how many were to be skipped last

    def asking(self) -> bool:
        """Whether to ask in this step; call it once a step."""
        if self._left:
            self._left -= 1
            return False
        return True

    def observe(self, gained: float, spent: float, step: float) -> None:
        """In a step of ``step`` seconds that asked, drafts saved ``gained`` seconds and cost ``spent``."""
        limit = _LIMIT * step
        balance = min(max(self._balance, -limit), limit) + gained - spent + _TOLERATED * step
        self._balance = min(max(balance, -limit), limit)
        if self._balance < 0:
            self._left = self._last = min(2 * self._last + 1, MOST_SKIPPED)
        elif self._balance >= limit:
            self._last = 0
