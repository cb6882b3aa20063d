"""Everything that speculates, built at once from what settings say: the drafters, and the controller that picks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvcache.storage import KVStorage
from model.interface import Executor
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.base import CostlyDrafter, Drafter
from specdec.drafters.registry import make_drafter
from specdec.drafting import AUTO

DraftLength = Literal["auto", "fixed"]

AUTO_DRAFTERS = ("ngram", "suffix")  # that need nothing but tokens; auto takes these and the costly ones there are


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    drafter: str = AUTO
    draft_length: DraftLength = "auto"


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a SpeculativeStep takes."""

    drafters: dict[str, Drafter]
    default_drafter: str
    controller: DraftLengthController | None  # None: each draft is verified as long as it was proposed

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may ask for."""
        return tuple(self.drafters) if self.controller is None else (AUTO, *self.drafters)


def build_speculation(
    config: SpeculationConfig,
    *,
    executor: Executor,
    storage: KVStorage,
    max_rows: int,
    measure: Callable[[Executor, KVStorage, int], StepCost] | None = None,
) -> Speculation:
    """For ``executor``, to which ``storage`` is bound and in which nothing is in use; steps have up to ``max_rows``.

    ``measure`` replaces the measurement of what a step costs. Raises ValueError for a drafter that cannot be had.
    """
    vocab_size = executor.info.vocab_size
    names = AUTO_DRAFTERS if config.drafter == AUTO else (config.drafter,)
    drafters = {name: make_drafter(name, vocab_size) for name in names}
    if config.drafter != AUTO and config.draft_length == "fixed":
        return Speculation(drafters, config.drafter, None)
    controller = DraftLengthController(
        (measure or measure_step_cost)(executor, storage, max_rows),
        rounds={name: d.round_seconds for name, d in drafters.items() if isinstance(d, CostlyDrafter)},
        adaptive=config.draft_length == "auto",
    )
    return Speculation(drafters, config.drafter, controller)
