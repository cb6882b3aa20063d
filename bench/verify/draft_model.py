"""The model that drafts in a verification: the one that was named, or else the target itself, loaded once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.memory import available_bytes
from kvcache.storage import DRAFT_PLANES
from model.draft_model import open_draft_model
from model.interface import Executor
from model.loader import LoadedModel, load_model
from model.weights import weight_files

_LOADING = 3  # times the weights: while a model is loaded they are there twice, and something has to be left over
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class DraftModel:
    """``executor`` has planes of its own. ``is_target``: the same weights, so at L0 every draft of it is accepted."""

    executor: Executor
    name: str
    is_target: bool = False


def find_draft(
    model: str | None, target: LoadedModel, folder: Path, report: Callable[[str], None], **options: Any
) -> tuple[DraftModel | None, str]:
    """The draft model ``model``, or else ``target`` from its checkpoint ``folder``; without either, None and the
    reason. ``options``: dtype, executor, kernels and num_threads, as the target was loaded with."""
    if model is not None:
        return named_draft(model, target, report, **options), ""
    found = target_as_draft(target, folder, report, **options)
    return (None, found) if isinstance(found, str) else (found, "")


def named_draft(model: str, target: LoadedModel, report: Callable[[str], None], **options: Any) -> DraftModel:
    """The model that the user named; see :func:`model.draft_model.open_draft_model`."""
    loaded = open_draft_model(model, target, report, **options)
    one, other = loaded.info, target.info
    same = (one.weights_hash, one.quantization) == (other.weights_hash, other.quantization)
    return DraftModel(loaded.executor, one.name, same)


def target_as_draft(
    target: LoadedModel, folder: Path, report: Callable[[str], None], *, free: int | None = None, **options: Any
) -> DraftModel | str:
    """``target`` once more, from its checkpoint ``folder`` with the options that it was loaded with.

    Where ``free`` bytes (default: what the device has) are too few, the reason instead, one line.
    """
    device = target.info.device
    size = sum(file.stat().st_size for file in weight_files(folder))
    needed = _LOADING * size * (2 if target.info.dtype == "float32" else 1)
    free = available_bytes(device) if free is None else free
    if needed > free:
        return (
            f"no draft model: loading the target a second time may take {needed / _GIB:.1f} GiB, and "
            f"{free / _GIB:.1f} GiB are free; --draft-model names a smaller one"
        )
    report(f"loading {target.info.name} once more, to draft for itself")
    loaded = load_model(
        folder,
        device=device,
        name=target.info.name,
        plane_prefix=DRAFT_PLANES,
        quantize=target.info.quantization,
        **options,
    )
    return DraftModel(loaded.executor, loaded.info.name, is_target=True)
