"""Who drafts in a case: every drafter that there is for this model, and oracles that know the answer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.offline import Speculate
from bench.verify.costs import InventedCosts
from bench.verify.draft_model import DraftModel
from bench.verify.factors import ORACLES
from kvcache.storage import KVStorage
from model.errors import ModelError
from model.interface import Executor, ExitExecutor
from specdec.drafters.base import Drafter
from specdec.drafters.exit_drafter import LEAST_SURVIVAL, ExitDrafter
from specdec.drafters.model_drafter import ModelDrafter
from specdec.drafters.registry import AUTO, DRAFTER_NAMES, EXIT, MODEL, make_drafter
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from specdec.sampling import Sampler
from specdec.speculation import Speculation, SpeculationConfig, build_speculation

NO_DRAFT_MODEL = "no draft model"
_EXIT_SHARE = 6  # of the target's layers one in so many drafts
_DEEP_EXITS = 0.25  # share of the cases
_DRAFT_SEED = 5
_ALL = (*DRAFTER_NAMES, MODEL, EXIT, AUTO)

Known = Mapping[int, Sequence[int]]  # outputs by seq_id


@dataclass(frozen=True, slots=True)
class Drafters:
    """``names`` are to be proved; ``left_out`` cannot be had for this model, with the reason."""

    names: tuple[str, ...]
    left_out: Mapping[str, str]
    vocab_size: int
    draft: DraftModel | None = None
    exit_layers: int | None = None
    seed: int = 0

    def draft_executor(self, name: str) -> Executor | None:
        """The draft model, for those drafters that run it."""
        return self.draft.executor if self.draft is not None and name in (MODEL, AUTO) else None

    def speculate(self, name: str, key: str, known: Known, max_rows: int) -> Speculate:
        """Builds what speculates in an engine whose steps have up to ``max_rows``; ``key`` names the case.

        ``model``, and ``exit`` in one of four cases, draft as far as they may, however unlikely that becomes. ``auto``
        is what a server has, but for the step costs, which are invented.
        """

        def build(executor: Executor, storage: KVStorage, sampler: Sampler) -> Speculation:
            costs = InventedCosts(f"{self.seed}/{key}", executor)
            if name == AUTO:
                speculation = build_speculation(
                    SpeculationConfig(AUTO, "auto", self.exit_layers),
                    executor=executor,
                    storage=storage,
                    sampler=sampler,
                    max_rows=max_rows,
                    draft=self.draft_executor(AUTO),
                    measure=costs,
                )
                return costs.controlled(speculation)
            drafter: Drafter
            if name == MODEL:
                draft = self.draft_executor(MODEL)
                assert draft is not None
                drafter = ModelDrafter(
                    draft,
                    storage,
                    sampler,
                    vocab_size=self.vocab_size,
                    max_rows=max_rows,
                    least_survival=0.0,
                    cost=costs(draft, storage, max_rows),
                )
            elif name == EXIT:
                assert self.exit_layers is not None
                # Nearly all is rejected that far, and each token costs layers.
                deep = random.Random(f"depth/{self.seed}/{key}").random() < _DEEP_EXITS
                drafter = ExitDrafter(
                    executor,
                    storage,
                    sampler,
                    num_layers=self.exit_layers,
                    least_survival=0.0 if deep else LEAST_SURVIVAL,
                    measure=costs,
                )
            elif name in ORACLES:
                drafter = WrongDrafter(OracleDrafter(known), _DRAFT_SEED, self.vocab_size, error_rate=ORACLES[name])
            else:
                drafter = make_drafter(name, self.vocab_size)
            return Speculation({drafter.name: drafter}, drafter.name, None)

        return build


def find_drafters(
    executor: Executor, draft: DraftModel | None, *, only: str | None = None, no_draft: str = NO_DRAFT_MODEL, seed: int
) -> Drafters:
    """All that can draft for ``executor``; ``no_draft`` says why there is no ``draft``.

    ``only`` keeps one drafter; the oracles stay, as they take what no drafter reaches. Raises ValueError if it is
    unknown or cannot be had.
    """
    vocab_size = executor.info.num_token_ids
    layers = max(1, executor.info.num_layers // _EXIT_SHARE)
    reasons: dict[str, str] = {}
    if draft is None:
        reasons[MODEL] = no_draft
    if (why := _no_exit(executor, layers)) is not None:
        reasons[EXIT] = why
    if only is not None and only not in _ALL:
        raise ValueError(f"unknown drafter {only!r}; there are {', '.join(_ALL)}")
    if only in reasons:
        raise ValueError(f"the drafter {only} cannot be had: {reasons[only]}")
    wanted = _ALL if only is None else (only,)
    return Drafters(
        names=tuple(dict.fromkeys([*(name for name in wanted if name not in reasons), *ORACLES])),
        left_out={name: why for name, why in reasons.items() if name in wanted},
        vocab_size=vocab_size,
        draft=draft,
        exit_layers=None if EXIT in reasons else layers,
        seed=seed,
    )


def _no_exit(executor: Executor, layers: int) -> str | None:
    if not isinstance(executor, ExitExecutor):
        return f"{executor.kind} cannot stop after its first layers"
    try:
        executor.check_exit(layers)
    except ModelError as error:
        return str(error)
    return None
