"""From what a user names to a loaded model, telling how far it is: for the server and for every command beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcache.storage import TARGET_PLANES
from model.int8 import Quantize
from model.kernels.load import KernelsChoice, find_kernels
from model.loader import DTypeName, ExecutorName, LoadedModel, load_model
from model.source import resolve_model


def open_model(
    model: str | None,
    report: Callable[[str], None],
    *,
    dtype: DTypeName,
    device: str,
    executor: ExecutorName,
    kernels: KernelsChoice,
    num_threads: int | None,
    max_batched_tokens: int = 512,
    plane_prefix: str = TARGET_PLANES,
    quantize: Quantize = "none",
) -> tuple[LoadedModel, Path]:
    """Find or fetch ``model``, build the kernels if this is the first time, load; returns it and its folder.

    The options are those of :func:`model.loader.load_model`. Raises ModelError or ModelSourceError, each one line.
    """
    source = resolve_model(model, report=report)
    # A first start compiles them, which takes a while; the sampler uses them on any device.
    find_kernels(kernels, progress=report)
    report(f"loading {source.name}")
    folder = Path(source.path)
    loaded = load_model(
        folder,
        dtype=dtype,
        device=device,
        executor=executor,
        kernels=kernels,
        num_threads=num_threads,
        max_batched_tokens=max_batched_tokens,
        name=source.name,
        plane_prefix=plane_prefix,
        quantize=quantize,
    )
    return loaded, folder
