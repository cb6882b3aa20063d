"""Whether a step that raised may run again without its audits: only if it left every live sequence as it was.

A step may raise late, when it has committed some sequences already (see ``SpeculativeStep.run``). So what it left is
compared with what it got, not trusted. KV that it wrote is no part of that: rows that are not computed yet are written
again before anything reads them.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdec.plan import PlanItem, StepPlan

Mark = tuple[int, int, tuple[int, ...], int]


def live_items(plan: StepPlan) -> tuple[PlanItem, ...]:
    """The plan without its audits."""
    return tuple(item for item in plan.items if not item.sequence.table.private)


def mark(items: Iterable[PlanItem]) -> tuple[Mark, ...]:
    """What a step changes of its sequences: tokens, what is computed and committed, and blocks."""
    sequences = [item.sequence for item in items]
    return tuple((len(s.tokens), s.num_computed, tuple(s.table.blocks), len(s.table.block_hashes)) for s in sequences)
