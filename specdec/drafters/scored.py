"""Drafts with their drafter's own estimate of how far the target will accept them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specdec.drafters.base import Drafter, DraftRequest


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """``cumulative[i]`` estimates the probability that ``token_ids[: i + 1]`` are all accepted.

    It never rises along the draft, so a draft cut anywhere keeps its estimates, and the sum of what is left is the
    number of draft tokens to expect.
    """

    token_ids: list[int]
    cumulative: list[float]  # as long as token_ids, each in (0, 1]
    match_length: int = 0  # tokens before the draft that had occurred before; 0 without a draft
    source: str = ""  # where they had occurred

    @property
    def expected_accepted(self) -> float:
        """Draft tokens that should be accepted."""
        return sum(self.cumulative)


@runtime_checkable
class ScoringDrafter(Drafter, Protocol):
    """A drafter that knows how good its drafts are."""

    def propose_scored(self, requests: Seq[DraftRequest]) -> list[ScoredDraft]:
        """What ``propose`` proposes, with estimates."""
