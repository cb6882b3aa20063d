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

    def release(self, seq_id: int) -> None:
        """Forget the sequence; unknown ids are fine."""
