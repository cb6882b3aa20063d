"""The drafter's contract: ragged in, ragged out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DraftRequest:
    sequence: Sequence
    max_drafts: int  # >= 1


class Drafter(Protocol):
    """Proposes continuations. What it proposes can change the speed, never the output.

    It keeps whatever state it needs by ``seq_id`` and derives it from ``sequence.tokens``; it must not mutate
    the sequence. An exception costs the step its drafts, not the request.
    """

    @property
    def name(self) -> str: ...

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """For each request 0..max_drafts ids (all within the vocabulary) that may follow ``sequence.tokens``."""

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """The last ``num_emitted`` of ``sequence.tokens`` were emitted by this step."""

    def release(self, seq_id: int) -> None:
        """Forget the sequence; unknown ids are fine."""


@runtime_checkable
class CostlyDrafter(Drafter, Protocol):
    """A drafter whose drafts cost forwards, so that whoever wants them weighs their price first.

    Drafting k_s tokens for each sequence s takes max k_s rounds, the r-th of one row for each sequence with k_s >= r.
    The first has the rows of ``num_missing`` too.
    """

    def round_seconds(self, rows: int) -> float:
        """What a round of ``rows`` (>= 0) rows should take."""

    def num_missing(self, sequence: Sequence) -> int | None:
        """Known tokens before the last one that the next ``propose`` would have to take in first.

        None if it would propose nothing for this sequence, whatever the price.
        """
