"""Drafts of what a constraint leaves no choice about."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.constraint import TokenConstraint
from specdec.drafters.base import DraftRequest
from specdec.drafters.scored import ScoredDraft
from specdec.sequence import Sequence

FORCED = "grammar"  # its name, which no request may ask for


class ForcedDrafter:
    """Proposes what the constraint forces, beside a sequence's own drafters. Costs no forward.

    The text is certain, the ids are not: the target may write it with other tokens. How often it does shows in what
    becomes of these drafts, as with every drafter.
    """

    def __init__(self, constraint: TokenConstraint) -> None:
        self._constraint = constraint

    @property
    def name(self) -> str:
        return FORCED

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        return [self._constraint.forced(request.sequence, request.max_drafts) for request in requests]

    def propose_scored(self, requests: Seq[DraftRequest]) -> list[ScoredDraft]:
        return [ScoredDraft(ids, [1.0] * len(ids), source=FORCED) for ids in self.propose(requests)]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass
