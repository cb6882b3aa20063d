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
from specdec.drafters.registry import AUTO, EXIT, MODEL, check_drafter_name
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
    if (why := _never_asked(settings, MODEL)) is not None:
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


def report_idle_exit(settings: Settings, report: Callable[[str], None]) -> None:
    """Tell whoever set ``exit_layers`` where nobody would draft by them."""
    if settings.exit_layers is not None and (why := _never_asked(settings, EXIT)) is not None:
        report(f"--exit-layers {settings.exit_layers} changes nothing: {why}")


def _never_asked(settings: Settings, name: str) -> str | None:
    """Why the drafter ``name`` would not draft; None if it would."""
    if not settings.num_speculative_tokens:
        return "speculation is off"
    return None if settings.drafter in (AUTO, name) else f"the drafter {settings.drafter} never uses it"


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
