"""Collecting drafts: asks each drafter once a step, and lets nothing a drafter does reach beyond the speed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from specdec.drafters.base import Drafter, DraftRequest
from specdec.params import SamplingParams
from specdec.sequence import Sequence

logger = logging.getLogger(__name__)


class Drafting:
    """The drafters by name, and who uses which.

    A drafter that raises or answers nonsense costs its sequences their drafts for this step; ``num_failures``
    counts it and the log says why.
    """

    def __init__(self, drafters: Mapping[str, Drafter], default_drafter: str | None, vocab_size: int) -> None:
        if default_drafter is not None and default_drafter not in drafters:
            raise ValueError(f"unknown drafter {default_drafter!r}, there are {sorted(drafters)}")
        self._drafters = dict(drafters)
        self._default = default_drafter
        self._vocab_size = vocab_size
        self.num_failures = 0

    def drafter_of(self, params: SamplingParams) -> Drafter | None:
        """The drafter a sequence uses; None without one (or with a name that nobody has)."""
        name = params.drafter if params.drafter is not None else self._default
        return None if name is None else self._drafters.get(name)

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        """Drafts for each request, at most ``max_drafts``, cut before the first id outside the vocabulary."""
        drafts: list[list[int]] = [[] for _ in requests]
        by_drafter: dict[int, tuple[Drafter, list[int]]] = {}
        for index, request in enumerate(requests):
            drafter = self.drafter_of(request.sequence.params)
            if drafter is not None:
                by_drafter.setdefault(id(drafter), (drafter, []))[1].append(index)
        for drafter, indices in by_drafter.values():
            try:
                answers = drafter.propose([requests[index] for index in indices])
                if len(answers) != len(indices):
                    raise ValueError(f"{len(answers)} answers to {len(indices)} requests")
                checked = [self._cut(a, requests[i].max_drafts) for i, a in zip(indices, answers, strict=True)]
            except Exception:
                self._failed(drafter, "propose")
                continue
            for index, ids in zip(indices, checked, strict=True):
                drafts[index] = ids
        return drafts

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Tell the sequence's drafter what was emitted."""
        drafter = self.drafter_of(sequence.params)
        if drafter is None:
            return
        try:
            drafter.update(sequence, num_emitted)
        except Exception:
            self._failed(drafter, "update")

    def release(self, seq_id: int) -> None:
        """Every drafter forgets the sequence."""
        for drafter in self._drafters.values():
            try:
                drafter.release(seq_id)
            except Exception:
                self._failed(drafter, "release")

    def _cut(self, ids: Seq[int], limit: int) -> list[int]:
        kept: list[int] = []
        for token in ids[:limit]:
            token = int(token)
            if not 0 <= token < self._vocab_size:
                break
            kept.append(token)
        return kept

    def _failed(self, drafter: Drafter, call: str) -> None:
        self.num_failures += 1
        logger.warning("drafter %s failed in %s; going on without its drafts", drafter.name, call, exc_info=True)
