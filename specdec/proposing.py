"""Which drafts a step verifies: asks the drafters in the order in which they cost, as the controller decides."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from specdec.draft_length.controller import Ask, DraftLengthController
from specdec.draft_length.lengths import Choice
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft import Draft
from specdec.drafters.forced import FORCED
from specdec.drafters.registry import AUTO
from specdec.drafting import Drafting
from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Wish:
    """A sequence that may have up to ``max_drafts`` (>= 1) drafts in this step."""

    sequence: Sequence
    max_drafts: int

    @property
    def fixed(self) -> bool:
        """Its request named a number of drafts, so it gets as many as are proposed."""
        return self.sequence.params.num_speculative_tokens is not None

    @property
    def tokens_left(self) -> int:
        """That its request allows."""
        return max(0, self.sequence.params.max_tokens - self.sequence.num_output_tokens)


class Proposing:
    """``controller`` None: each sequence's one drafter is asked, and all that it proposes is verified.

    Raises ValueError if sequences may have several drafters and nobody chooses.
    """

    def __init__(self, drafting: Drafting, default_drafter: str | None, controller: DraftLengthController | None):
        if controller is None and default_drafter == AUTO:
            raise ValueError(f"the drafter {AUTO!r} needs a controller")
        if controller is not None:
            controller.use({name: partial(drafting.round_seconds, name) for name in drafting.costly})
        self._drafting = drafting
        self._controller = controller
        self._asked: list[Sequence] = []

    def drafts(self, wishes: Seq[Wish], *, rows: int, tokens: int) -> tuple[list[Draft], Choice | None]:
        """A draft for each wish, empty if none pays, and what is expected of a step that has ``rows`` rows and emits
        ``tokens`` without drafts."""
        controller = self._controller
        if controller is None:
            return self._of_the_first(wishes, [self._drafting.names_of(wish.sequence) for wish in wishes]), None
        # Under load most sequences are asked only now and then, so what is done for each is done for those alone.
        asking = controller.asking()
        due = [i for i, wish in enumerate(wishes) if wish.fixed or (asking and controller.due(wish.sequence.seq_id))]
        asked = [wishes[i] for i in due]
        names = [self._drafting.names_of(wish.sequence) for wish in asked]
        cheap = self._cheap(list(zip(asked, names, strict=True)))
        asks = [
            Ask(
                wish.sequence.seq_id,
                wish.max_drafts,
                tuple(drafts),
                self._missing(wish, own),
                wish.fixed,
                wish.tokens_left,
            )
            for wish, own, drafts in zip(asked, names, cheap, strict=True)
        ]
        self._asked = [wish.sequence for wish in asked]
        picks = controller.plan(asks, rows=rows, tokens=tokens)
        made: list[Draft] = [
            Draft("") if pick.index is None else drafts[pick.index] for pick, drafts in zip(picks, cheap, strict=True)
        ]
        for name in self._drafting.costly:
            indices = [i for i, pick in enumerate(picks) if pick.costly == name]
            if indices:
                requests = [DraftRequest(asked[i].sequence, picks[i].length) for i in indices]
                for i, draft in zip(indices, self._drafting.propose(name, requests), strict=True):
                    made[i] = draft
        choice = controller.settle(made, rows=rows, tokens=tokens)
        found = [Draft("")] * len(wishes)
        for i, draft, length in zip(due, made, choice.lengths, strict=True):
            found[i] = draft.cut(length)
        return found, choice

    def observe(self, emitted: Mapping[int, Seq[int]], *, rows: int, seconds: float, drafting: float = 0.0) -> None:
        """The step ran ``rows`` rows in ``seconds``, without the ``drafting`` before, and emitted these tokens by
        sequence."""
        if self._controller is not None:
            self._controller.observe(
                [emitted.get(sequence.seq_id, ()) for sequence in self._asked],
                rows=rows,
                seconds=seconds,
                drafting=drafting,
            )
            self._asked = []

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        if self._controller is not None:
            self._controller.release(seq_id)

    def _of_the_first(self, wishes: Seq[Wish], names: Seq[tuple[str, ...]]) -> list[Draft]:
        """Each sequence's own drafter, or what a constraint forces where that drafter does not see it."""
        drafts = [Draft("")] * len(wishes)
        for name in dict.fromkeys(own[0] for own in names if own):
            indices = [i for i, own in enumerate(names) if own and own[0] == name]
            requests = [DraftRequest(wishes[i].sequence, wishes[i].max_drafts) for i in indices]
            for i, draft in zip(indices, self._drafting.propose(name, requests), strict=True):
                drafts[i] = draft
        indices = [i for i, own in enumerate(names) if FORCED in own]
        if indices:
            requests = [DraftRequest(wishes[i].sequence, wishes[i].max_drafts) for i in indices]
            for i, forced in zip(indices, self._drafting.propose(FORCED, requests), strict=True):
                if drafts[i].token_ids[: len(forced.token_ids)] != forced.token_ids:
                    drafts[i] = forced  # unless the drafter knew it, and what follows
        return drafts

    def _cheap(self, wishes: Seq[tuple[Wish, tuple[str, ...]]]) -> list[list[Draft]]:
        """What the cheap drafters of each propose, without empty drafts."""
        found: list[list[Draft]] = [[] for _ in wishes]
        for name in self._drafting.drafters:
            if name in self._drafting.costly:
                continue
            indices = [i for i, (_, own) in enumerate(wishes) if name in own]
            if indices:
                requests = [DraftRequest(wishes[i][0].sequence, wishes[i][0].max_drafts) for i in indices]
                for i, draft in zip(indices, self._drafting.propose(name, requests), strict=True):
                    if draft.token_ids:
                        found[i].append(draft)
        return found

    def _missing(self, wish: Wish, names: tuple[str, ...]) -> dict[str, int] | None:
        costly = [name for name in names if name in self._drafting.costly]
        if not costly:
            return None
        found = {name: self._drafting.num_missing(name, wish.sequence) for name in costly}
        return {name: missing for name, missing in found.items() if missing is not None}
