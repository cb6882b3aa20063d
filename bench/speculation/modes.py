"""The engine configurations that are compared: off, each drafter at a fixed draft length, and the controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.offline import OfflineConfig
from bench.speculation.runs import MeasuredEngine
from kvcache.storage import KVStorage
from model.errors import ModelError
from model.interface import Executor
from model.loader import LoadedModel
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.registry import AUTO, DRAFTER_NAMES, EXIT, MODEL

OFF = "off"
FOR_TESTS = ("none", "random")  # drafters of the registry that make nothing faster
DRAFTERS = (*(name for name in DRAFTER_NAMES if name not in FOR_TESTS), MODEL, EXIT)
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
    chosen = {name for name in names if name != OFF}
    ordered = sorted(chosen, key=lambda name: (name != AUTO, MODE_NAMES.index(name)))
    return [Mode(name, max_k if name == AUTO else k) for name in ordered]


@dataclass(frozen=True, slots=True)
class EngineMaker:
    """Makes a fresh engine for every run: no state of a drafter, and no cached prefix, outlives its run.

    What a step costs is measured for the first one that asks, as a server does when it loads a model; each engine
    refines a copy of its own. ``exit_layers`` None: mode exit takes its own default, and auto does without.
    """

    loaded: LoadedModel
    draft: LoadedModel | None = None
    exit_layers: int | None = None
    _costs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)  # by id of the executor

    def make(self, mode: Mode, *, seats: int, num_blocks: int) -> MeasuredEngine:
        """An engine with ``seats`` sequences at once. Raises ValueError if this mode cannot be built here."""
        draft = self.draft.executor if self.draft is not None and mode.name in (MODEL, AUTO) else None
        return MeasuredEngine(
            self.loaded.executor, self.config(mode, seats), num_blocks=num_blocks, draft=draft, measure=self._measure
        )

    def config(self, mode: Mode, seats: int) -> OfflineConfig:
        """What the engine of a mode is built with."""
        return OfflineConfig(
            block_size=BLOCK_SIZE,
            num_speculative_tokens=mode.k,
            drafter=mode.name,  # off builds none
            draft_length="auto" if mode.adaptive else "fixed",
            exit_layers=self.exit_layers,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_num_seqs=seats,
            prefix_cache=False,
            kernels=self.loaded.kernels,
            ledger=False,
        )

    def _measure(self, executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
        key = id(executor)
        if key not in self._costs:
            self._costs[key] = measure_step_cost(executor, storage, max_rows).points
        return StepCost(self._costs[key])

    def reason_against(self, mode: Mode) -> str:
        """Why the mode cannot be built here; empty if it can."""
        try:
            self.make(mode, seats=1, num_blocks=64)
        except (ValueError, ModelError) as error:
            return " ".join(str(error).split())
        return ""
