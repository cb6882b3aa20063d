"""The engine configurations that are compared: off, each drafter at a fixed draft length, and the controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.offline import OfflineConfig
from bench.speculation.runs import MeasuredEngine
from kvcache.storage import KVStorage
from model.interface import Executor
from model.loader import LoadedModel
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.registry import DRAFTER_NAMES

OFF, AUTO = "off", "auto"
FOR_TESTS = ("none", "random")  # drafters of the registry that make nothing faster
NEED_MORE = ("model", "exit")  # drafters that need more than tokens
DRAFTERS = tuple(dict.fromkeys([*(name for name in DRAFTER_NAMES if name not in FOR_TESTS), *NEED_MORE]))
MODE_NAMES = (OFF, *DRAFTERS, AUTO)
MAX_BATCHED_TOKENS = 512  # rows of a step, as a server has them by default
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Mode:
    """``off`` has k 0; ``auto`` lets the controller pick drafters and at most k drafts; the others ask for k."""

    name: str
    k: int

    @property
    def adaptive(self) -> bool:
        return self.name == AUTO


def make_modes(names: Sequence[str], *, k: int, max_k: int) -> list[Mode]:
    """The named modes, ``auto`` first, since it is what a server runs; ``off`` is part of every pair anyway."""
    chosen = [name for name in names if name != OFF]
    ordered = sorted(chosen, key=lambda name: (name != AUTO, MODE_NAMES.index(name)))
    return [Mode(name, max_k if name == AUTO else k) for name in ordered]


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """Makes a fresh engine for every run: no state of a drafter, and no cached prefix, outlives its run.

    What a step costs is measured for the first one that asks, as a server does when it loads a model; each engine
    refines a copy of its own. ``extras`` are fields of OfflineConfig that ``NEED_MORE`` need.
    """

    loaded: LoadedModel
    extras: dict[str, Any]
    _points: list[tuple[int, float]] = field(default_factory=list)

    def make(self, mode: Mode, *, seats: int, num_blocks: int) -> MeasuredEngine:
        """An engine with ``seats`` sequences at once. Raises ValueError if this mode cannot be built here."""
        config = self.config(mode, seats)
        return MeasuredEngine(self.loaded.executor, config, num_blocks=num_blocks, measure=self._measure)

    def config(self, mode: Mode, seats: int) -> OfflineConfig:
        """Raises ValueError if the engine does not know what the mode asks for."""
        wanted: dict[str, Any] = {"num_speculative_tokens": mode.k}
        if mode.name != OFF:
            wanted |= {"drafter": mode.name, "draft_length": "auto" if mode.adaptive else "fixed"}
        if mode.name in (*NEED_MORE, AUTO):
            wanted |= self.extras
        known = {field.name for field in dataclasses.fields(OfflineConfig)}
        missing = sorted(name for name in wanted if name not in known)
        if missing:
            raise ValueError(f"the engine has no {' or '.join(missing)}")
        return OfflineConfig(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=seats,
            prefix_cache=False,
            kernels=self.loaded.kernels,
            ledger=False,
            **{name: value for name, value in wanted.items() if name in known},
        )

    def _measure(self, executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
        if not self._points:
            self._points.extend(measure_step_cost(executor, storage, max_rows).points)
        return StepCost(self._points)

    def reason_against(self, mode: Mode) -> str:
        """Why the mode cannot be built here; empty if it can."""
        try:
            self.make(mode, seats=1, num_blocks=64)
        except (ValueError, TypeError) as error:
            return " ".join(str(error).split())
        return ""
