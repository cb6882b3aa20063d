"""A draft, by whom, and what its drafter expects of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """What one drafter proposed for one sequence."""

    drafter: str
    token_ids: tuple[int, ...] = ()
    cumulative: tuple[float, ...] | None = None  # the drafter's estimates, see specdec.drafters.scored.ScoredDraft

    def cut(self, length: int) -> Draft:
        """Its first ``length`` tokens."""
        if length >= len(self.token_ids):
            return self
        cumulative = None if self.cumulative is None else self.cumulative[:length]
        return Draft(self.drafter, self.token_ids[:length], cumulative)
