"""The grammars of sequences as the step sees them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from model.panics import panics_as_errors
from specdec.constraint import TokenConstraint
from specdec.errors import SamplingError
from specdec.grammar.compiler import GrammarCache, GrammarError
from specdec.grammar.place import MAX_CHECKED_DRAFTS, GrammarPlace
from specdec.pipeline import Mask
from specdec.sequence import Sequence


class GrammarConstraint(TokenConstraint):
    """``SamplingParams.grammar`` for every sequence that has one. One thread at a time, the step's.

    Its state is derived from a sequence's output tokens and may be dropped at any time.
    """

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache
        self._places: dict[int, GrammarPlace] = {}

    def applies(self, sequence: Sequence) -> bool:
        return sequence.params.grammar is not None

    @panics_as_errors
    def mask(self, sequence: Sequence, drafts: Seq[int]) -> Mask | None:
        """Raises SamplingError if the grammar cannot be compiled or is too complex."""
        return self._place(sequence, drafts).mask()

    @panics_as_errors
    def num_allowed(self, sequence: Sequence, drafts: Seq[int]) -> int:
        return self._place(sequence, ()).num_allowed(drafts[:MAX_CHECKED_DRAFTS])

    @panics_as_errors
    def forced(self, sequence: Sequence, limit: int) -> list[int]:
        try:
            return self._place(sequence, ()).forced(limit)
        except SamplingError:  # its mask will say so
            return []

    def release(self, seq_id: int) -> None:
        self._places.pop(seq_id, None)

    def _place(self, sequence: Sequence, drafts: Seq[int]) -> GrammarPlace:
        place = self._places.get(sequence.seq_id)
        if place is None:
            grammar = sequence.params.grammar
            assert grammar is not None
            try:
                place = GrammarPlace(self._cache, grammar)
            except GrammarError as error:
                raise SamplingError(f"the grammar {error}") from error
            self._places[sequence.seq_id] = place
        try:
            place.move_to([*sequence.output_token_ids, *drafts])
        except BaseException:
            self.release(sequence.seq_id)
            raise
        return place
