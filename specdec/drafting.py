"""Collecting drafts: asks each drafter at most once a step, and lets nothing a drafter does reach beyond the speed."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping

from kvcache.violation import LedgerError
from specdec.constraint import TokenConstraint
from specdec.drafters.base import CostlyDrafter, Drafter, DraftRequest
from specdec.drafters.draft import Draft
from specdec.drafters.forced import FORCED, ForcedDrafter
from specdec.drafters.registry import AUTO, NOTHING
from specdec.drafters.scored import ScoringDrafter
from specdec.errors import SamplingError
from specdec.sequence import Sequence

logger = logging.getLogger(__name__)

_MOST_MISSING = 10**7
_NEVER = 1e9  # seconds of a round of whoever cannot say


class Drafting:
    """The drafters by name, and who uses which: one of them, or with ``AUTO`` those of ``auto`` (None: all).

    A drafter that raises or answers nonsense costs its sequences its drafts for this step; ``num_failures`` counts it
    and the log says why. Only what the ledger finds wrong in a drafter's forward is raised. Raises ValueError for a
    default that is no drafter, or for a drafter named ``AUTO``.

    Who is under ``constraint`` has what it forces as one more drafter, beside those that draft for it; and of every
    draft only what the constraint allows is left.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        default_drafter: str | None,
        vocab_size: int,
        auto: Container[str] | None = None,
        constraint: TokenConstraint | None = None,
    ) -> None:
        if AUTO in drafters:
            raise ValueError(f"no drafter is named {AUTO!r}")
        if default_drafter is not None and default_drafter != AUTO and default_drafter not in drafters:
            raise ValueError(f"unknown drafter {default_drafter!r}, there are {sorted(drafters)}")
        self._drafters = dict(drafters)
        self._default = default_drafter
        self._auto = tuple(name for name in drafters if auto is None or name in auto)
        self._vocab_size = vocab_size
        self._constraint = constraint
        if constraint is not None:
            self._drafters[FORCED] = ForcedDrafter(constraint)
        self._scoring = {name: d for name, d in self._drafters.items() if isinstance(d, ScoringDrafter)}
        self.costly = {name: d for name, d in drafters.items() if isinstance(d, CostlyDrafter)}
        self.num_failures = 0

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        return self._drafters

    def names_of(self, sequence: Sequence) -> tuple[str, ...]:
        """The drafters of a sequence; none without one (or with a name that nobody has)."""
        asked = sequence.params.drafter
        name = asked if asked is not None else self._default
        own = self._auto if name == AUTO else (name,) if name in self._drafters and name is not None else ()
        if self._constrained(sequence) and any(name != NOTHING for name in own):
            return (*own, FORCED)
        return own

    def _constrained(self, sequence: Sequence) -> bool:
        return self._constraint is not None and self._constraint.applies(sequence)

    def propose(self, name: str, requests: list[DraftRequest]) -> list[Draft]:
        """Drafts of drafter ``name``: at most ``max_drafts`` long, cut before the first id that cannot come."""
        drafter = self._drafters[name]
        try:
            answers = self._ask(name, drafter, requests)
            if len(answers) != len(requests):
                raise ValueError(f"{len(answers)} answers to {len(requests)} requests")
            drafts = [self._cut(a, r.max_drafts) for a, r in zip(answers, requests, strict=True)]
        except LedgerError:
            raise
        except Exception:
            self._failed(drafter, "propose")
            return [Draft(name)] * len(requests)
        if name == FORCED:
            return drafts
        return [self._allowed(draft, r.sequence) for draft, r in zip(drafts, requests, strict=True)]

    def round_seconds(self, name: str, rows: int) -> float:
        """What a round of costly drafter ``name`` should take; very long if it cannot say."""
        try:
            seconds = float(self.costly[name].round_seconds(rows))
            if not 0.0 < seconds < _NEVER:
                raise ValueError(f"a round takes some time, not {seconds} s")
            return seconds
        except Exception:
            self._failed(self.costly[name], "round_seconds")
            return _NEVER

    def num_missing(self, name: str, sequence: Sequence) -> int | None:
        """Rows that costly drafter ``name`` lacks for ``sequence``; None if it cannot draft for it, or cannot say."""
        try:
            missing = self.costly[name].num_missing(sequence)
            return None if missing is None else min(max(0, int(missing)), _MOST_MISSING)
        except Exception:
            self._failed(self.costly[name], "num_missing")
            return None

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        """Tell the sequence's drafters what was emitted."""
        for name in self.names_of(sequence):
            try:
                self._drafters[name].update(sequence, num_emitted)
            except Exception:
                self._failed(self._drafters[name], "update")

    def release(self, seq_id: int) -> None:
        """Every drafter forgets the sequence."""
        for drafter in self._drafters.values():
            try:
                drafter.release(seq_id)
            except Exception:
                self._failed(drafter, "release")

    def _ask(self, name: str, drafter: Drafter, requests: list[DraftRequest]) -> list[Draft]:
        scoring = self._scoring.get(name)
        if scoring is None:
            return [Draft(name, tuple(ids)) for ids in drafter.propose(requests)]
        return [Draft(name, tuple(d.token_ids), tuple(d.cumulative)) for d in scoring.propose_scored(requests)]

    def _allowed(self, draft: Draft, sequence: Sequence) -> Draft:
        if self._constraint is None or not draft.token_ids or not self._constraint.applies(sequence):
            return draft
        try:
            return draft.cut(self._constraint.num_allowed(sequence, draft.token_ids))
        except SamplingError:  # the target's own token will say so
            return draft.cut(0)
        except Exception:  # no other sequence's fault; if its mask fails too, it ends alone
            logger.warning("a constraint failed; its sequence goes on without drafts", exc_info=True)
            return draft.cut(0)

    def _cut(self, draft: Draft, limit: int) -> Draft:
        kept: list[int] = []
        for token in draft.token_ids[:limit]:
            token = int(token)
            if not 0 <= token < self._vocab_size:
                break
            kept.append(token)
        cumulative = draft.cumulative
        if cumulative is not None and len(cumulative) != len(draft.token_ids):
            raise ValueError(f"{len(cumulative)} estimates for {len(draft.token_ids)} draft tokens")
        if cumulative is not None and not all(0.0 <= chance <= 1.0 for chance in cumulative):
            raise ValueError(f"estimates are chances, got {cumulative}")
        return Draft(draft.drafter, tuple(kept), None if cumulative is None else cumulative[: len(kept)])

    def _failed(self, drafter: Drafter, call: str) -> None:
        self.num_failures += 1
        logger.warning("drafter %s failed in %s; going on without its drafts", drafter.name, call, exc_info=True)
