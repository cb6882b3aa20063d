"""Invented step costs: a case's controller decides as they say, so that its decisions vary and can be repeated.

What steps really take differs from run to run, and on one machine it leads to the same few decisions. So each case
draws what the target, the draft model and the first layers cost; nothing that is measured corrects it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from kvcache.storage import KVStorage
from model.interface import Executor
from specdec.draft_length.controller import DraftLengthController, Seconds
from specdec.draft_length.cost import StepCost
from specdec.drafters.base import CostlyDrafter
from specdec.speculation import Speculation

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_STEP = 1e-3  # seconds of one row
_SLOPES = (0.0, 0.0, 0.02, 0.1, 0.4)  # what each further row costs, as a share of the first
_STAIRS = (0.0, 0.0, 0.5)  # what comes on top beyond 8 rows, and again beyond 32
_DRAFT_SHARES = (0.02, 0.1, 0.5)  # a drafter's round of one row, as a share of the target's
_HOST_SHARES = (0.0, 0.01, 0.1)  # what the host takes to draft, as a share of the step
_PROBING = (1.0, 30.0)  # times as much is saved for looking at what costly drafters do


class FixedCost(StepCost):
    """Stays as it is, whatever steps take."""

    def observe(self, rows: int, seconds: float) -> None:
        """Nothing is learned."""


class FixedPaceController(DraftLengthController):
    """Hears that every step took ``factor`` times what ``cost`` says, and drafting ``drafting`` of a step."""

    def __init__(self, cost: StepCost, *, rounds: Mapping[str, Seconds], factor: float, drafting: float) -> None:
        super().__init__(cost, rounds=rounds)
        self._factor = factor
        self._drafting = drafting

    def observe(self, emitted: Seq[Seq[int]], *, rows: int, seconds: float, drafting: float = 0.0) -> None:
        step = self.cost.seconds(rows)
        super().observe(emitted, rows=rows, seconds=self._factor * step, drafting=self._drafting * step)


class InventedCosts:
    """What steps cost in one case; a function of ``key`` alone. Implements specdec.speculation.Measure."""

    def __init__(self, key: str, target: Executor) -> None:
        self._key = key
        self._target = target

    def __call__(self, executor: Executor, storage: KVStorage, max_rows: int) -> FixedCost:
        drafts = executor is not self._target
        rng = random.Random(f"costs/{self._key}/{executor.kind if drafts else ''}")
        first = _STEP * (rng.choice(_DRAFT_SHARES) if drafts else 1.0)
        slope, stair = rng.choice(_SLOPES), rng.choice(_STAIRS)
        return FixedCost(
            [(rows, first * (1.0 + slope * (rows - 1) + stair * ((rows > 8) + (rows > 32)))) for rows in _ROWS]
        )

    def controlled(self, speculation: Speculation) -> Speculation:
        """``speculation`` with a controller that learns no time."""
        assert speculation.controller is not None
        rounds = {name: d.round_seconds for name, d in speculation.drafters.items() if isinstance(d, CostlyDrafter)}
        rng = random.Random(f"probing/{self._key}")
        controller = FixedPaceController(
            speculation.controller.cost, rounds=rounds, factor=rng.choice(_PROBING), drafting=rng.choice(_HOST_SHARES)
        )
        return dataclasses.replace(speculation, controller=controller)
