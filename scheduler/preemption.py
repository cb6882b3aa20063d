"""Preemption without need, for tests: results must not depend on when a sequence was preempted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler.choice import Choice


class ForcedPreemption(Protocol):
    """Asked at the start of every step."""

    def select(self, running: Sequence[Choice]) -> list[Choice]:
        """Which of ``running`` to preempt now. They may be admitted again in the same step."""


class PreemptNever:
    def select(self, running: Sequence[Choice]) -> list[Choice]:
        return []


class PreemptEveryStep:
    """Preempts every running choice that emitted a token since it was admitted: each makes progress in between."""

    def select(self, running: Sequence[Choice]) -> list[Choice]:
        return [choice for choice in running if choice.emitted_since_admission]
