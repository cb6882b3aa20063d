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
from specdec.drafters.base import Drafter
from specdec.drafters.exit_drafter import ExitDrafter
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.registry import AUTO, EXIT, MODEL, make_drafter
from specdec.sampling import Sampler

DraftLength = Literal["auto", "fixed"]
Measure = Callable[[Executor, KVStorage, int], StepCost]  # (executor, storage, most rows)

# Need nothing but tokens. The suffix drafter finds what the n-gram drafter finds, and says how likely it is: auto takes
# it and the costly ones there are; the other is there for requests that name it.
TEXT_DRAFTERS = ("ngram", "suffix")
_EXIT_SHARE = 3  # of the target's layers one in so many drafts, unless it is said how many


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    drafter: str = AUTO
    draft_length: DraftLength = "auto"
    exit_layers: int | None = None  # of the target that draft; with None, AUTO does without


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a SpeculativeStep takes."""

    drafters: dict[str, Drafter]
    default_drafter: str
    controller: DraftLengthController | None  # None: each draft is verified as long as it was proposed

    @property
    def auto(self) -> tuple[str, ...]:
        """Among which a sequence without a drafter of its own has the best."""
        return tuple(name for name in self.drafters if name != "ngram")

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may ask for."""
        return tuple(self.drafters) if self.controller is None else (AUTO, *self.drafters)


def build_speculation(
    config: SpeculationConfig,
    *,
    executor: Executor,
    storage: KVStorage,
    sampler: Sampler,
    max_rows: int,
    draft: Executor | None = None,
    measure: Measure = measure_step_cost,
) -> Speculation:
    """For ``executor``, to which ``storage`` is bound and in which nothing is in use; steps have up to ``max_rows``.

    ``draft`` is a draft model on the same storage. ``measure`` says what so many rows of an executor cost. Raises
    ValueError for a drafter that cannot be had, and ModelError for a model that cannot stop after its first layers.
    """
    drafters: dict[str, Drafter] = {}
    vocab_size = executor.info.num_token_ids
    wanted = TEXT_DRAFTERS if config.drafter == AUTO else (config.drafter,)
    for name in wanted:
        if name not in (MODEL, EXIT):
            drafters[name] = make_drafter(name, vocab_size)
    if MODEL in wanted and draft is None:
        raise ValueError("the drafter model needs a draft model: name one with draft_model")
    if draft is not None and config.drafter in (AUTO, MODEL):
        cost = measure(draft, storage, max_rows)
        drafters[MODEL] = ModelDrafter(draft, storage, sampler, vocab_size=vocab_size, max_rows=max_rows, cost=cost)
    if EXIT in wanted or (config.drafter == AUTO and config.exit_layers is not None):
        layers = config.exit_layers or max(1, executor.info.num_layers // _EXIT_SHARE)
        drafters[EXIT] = ExitDrafter(executor, storage, sampler, num_layers=layers, measure=measure)
    if config.drafter != AUTO and config.draft_length == "fixed":
        return Speculation(drafters, config.drafter, None)
    controller = DraftLengthController(measure(executor, storage, max_rows), adaptive=config.draft_length == "auto")
    return Speculation(drafters, config.drafter, controller)
