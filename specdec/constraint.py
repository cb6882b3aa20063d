"""The place for grammar masks: who may forbid tokens at a position beyond a sequence's own parameters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from specdec.pipeline import Mask
from specdec.sequence import Sequence


class TokenConstraint(Protocol):
    """Masks per position, e.g. from a grammar. It must not mutate the sequence."""

    def applies(self, sequence: Sequence) -> bool:
        """True if this sequence is constrained; constant over its life."""

    def mask(self, sequence: Sequence, drafts: Seq[int]) -> Mask | None:
        """What may follow ``sequence.tokens + drafts``: ``[V]``, True where allowed; None if everything may.

        All of ``drafts`` were allowed in turn.
        """

    def num_allowed(self, sequence: Sequence, drafts: Seq[int]) -> int:
        """How many of ``drafts`` may follow ``sequence.tokens`` in turn: the others need not be verified.

        A constraint that cannot tell keeps them all.
        """
        return len(drafts)

    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        """At most ``limit`` ids that should follow ``sequence.tokens`` because little else may: a draft, no more."""
        return []

    def release(self, seq_id: int) -> None:
        """Forget the sequence; unknown ids are fine."""
