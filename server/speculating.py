"""What speculates in a server, as its settings ask: draft model, drafters, and the controller with measured costs."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.storage import KVStorage
from model.checks_cache import ChecksCache, digest
from model.draft_model import open_draft_model
from model.interface import Executor
from model.loader import LoadedModel
from model.model_cache import default_home
from server.settings import Settings
from specdec.draft_length.cost import StepCost
from specdec.draft_length.measure import measure_step_cost
from specdec.drafters.registry import AUTO, MODEL, check_drafter_name
from specdec.sampling import Sampler
from specdec.speculation import Measure, Speculation, SpeculationConfig, build_speculation


def check_speculation(settings: Settings) -> None:
    """Before anything is loaded, and with speculation off too. Raises ValueError for a drafter that cannot be had."""
    check_drafter_name(settings.drafter)
    if settings.drafter == MODEL and settings.draft_model is None:
        raise ValueError("the drafter model needs a draft model: name one with --draft-model")


def load_draft(settings: Settings, loaded: LoadedModel, report: Callable[[str], None]) -> LoadedModel | None:
    """The settings' draft model for ``loaded``; None if there is none, or nobody would ask it, which is reported.

    Raises ModelError or ModelSourceError, each with one line.
    """
    if settings.draft_model is None:
        return None
    if not settings.num_speculative_tokens or settings.drafter not in (AUTO, MODEL):
        on = settings.num_speculative_tokens
        why = f"the drafter {settings.drafter} never asks it" if on else "speculation is off"
        report(f"--draft-model {settings.draft_model} is not loaded: {why}")
        return None
    return open_draft_model(
        settings.draft_model,
        loaded,
        report,
        dtype=settings.dtype,
        executor=settings.executor,
        kernels=settings.kernels,
        num_threads=settings.num_threads,
        max_batched_tokens=settings.max_num_batched_tokens,
    )


def speculation(
    settings: Settings, loaded: LoadedModel, draft: LoadedModel | None, storage: KVStorage, sampler: Sampler
) -> Speculation | None:
    """None with ``num_speculative_tokens`` 0. Both models are bound to ``storage``, in which nothing is in use.

    Raises ValueError, or ModelError for a model that cannot stop after its first layers.
    """
    if not settings.num_speculative_tokens:
        return None
    return build_speculation(
        SpeculationConfig(settings.drafter, settings.draft_length, settings.exit_layers),
        executor=loaded.executor,
        storage=storage,
        sampler=sampler,
        max_rows=settings.max_num_batched_tokens,
        draft=None if draft is None else draft.executor,
        measure=_remembered(loaded.fingerprint),
    )


def _remembered(fingerprint: str) -> Measure:
    """Measures what a step costs once for a model and machine."""
    cache = ChecksCache(default_home() / "checks")

    def measure(executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
        info = executor.info
        key = digest(["step cost, shortest", fingerprint, info.weights_hash, info.dtype, executor.kind, max_rows])
        try:
            return StepCost([(int(rows), float(seconds)) for rows, seconds in cache.get(key)])
        except (TypeError, ValueError):
            cost = measure_step_cost(executor, storage, max_rows)
            cache.put(key, cost.points)
            return cost

    return measure
