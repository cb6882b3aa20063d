"""The exactness probe: does row i of a packed batch have the bits of the same row alone, on this machine?

The level is measured and reported, never assumed:

- L0: every comparison was bit-equal, so answers do not depend on batch mates, chunking, drafts or cache hits.
- L2: some were not, so equal only up to near-ties of the logits.
"""

from __future__ import annotations

import torch

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.exactness import ExactnessCheck, ExactnessReport
from model.generic import BASE_TILE, TILE_CLASSES
from model.interface import Executor, TiledExecutor
from model.probe_rows import BLOCK_SIZE, RowChecks, build_storage, random_ids
from model.products import RecordedProducts, differing_places, differing_pointwise, differing_products

_NAMED = 6  # failed checks that the reason names


def probe_exactness(executor: Executor, storage: KVStorage | None = None, *, budget: int = 512) -> ExactnessReport:
    """Measure ``executor`` with batches of up to ``budget`` rows and the thread count as configured.

    Runs on a small storage of its own and binds ``storage`` again at the end, if given. A tiled executor uses the
    tile classes that passed from then on. Takes about 160 forwards; 4,000 rows for a budget of 512.
    """
    tiles: tuple[int, ...] = ()
    checks: list[ExactnessCheck] = []
    try:
        if isinstance(executor, TiledExecutor):
            tiles, checks = _measure_tiles(executor, budget)
        checks += RowChecks(executor, budget).run()
    finally:
        if storage is not None:
            executor.bind(storage)
    failed = [check for check in checks if not check.passed]
    if failed:
        detail = f"{len(failed)} of {len(checks)} checks found rows that depend on their batch; "
        detail += f"{failed[0].name}: {failed[0].detail}"
        if failed[1:]:
            others = ", ".join(check.name for check in failed[1 : 1 + _NAMED])
            detail += f"; also: {others}" + (", and more" if len(failed) > 1 + _NAMED else "")
    else:
        detail = f"{len(checks)} checks, every row bit-equal to itself alone ({torch.get_num_threads()} threads)"
    return ExactnessReport("L2" if failed else "L0", tuple(checks), detail, tiles, _padding(executor, tiles))


def _padding(executor: Executor, tiles: tuple[int, ...]) -> str:
    """What an executor computes for nobody, so that its products have one of a few shapes."""
    if not isinstance(executor, TiledExecutor):
        return "none"
    *some, last = map(str, tiles)
    text = f"rows to tiles of {', '.join(some)} or {last}" if some else f"rows to tiles of {last}"
    return f"{text}; {executor.inner_padding}" if executor.inner_padding else text


def _measure_tiles(executor: TiledExecutor, budget: int) -> tuple[tuple[int, ...], list[ExactnessCheck]]:
    """Which other tiles give the bits of the base tile; ``executor`` uses them from now on. And checks of the base
    tile: whether its matrix products, and its operations on single elements, care for a row's place.

    Another tile must pass whole forwards, layer by layer, each of its products with rows that cancel, and each
    operation on single elements: neither a small tile's rows nor a thread's share of a large one need fill vectors.
    """
    longest = executor.info.max_model_len
    executor.tile_classes = (BASE_TILE,)
    base = RecordedProducts()
    with base:
        executor.forward(_batches(executor, min(BASE_TILE, longest))[1])
    odd = list(differing_products(base))
    detail = "; ".join(odd) or f"{len(base.found)} kinds, each with rows that cancel, at several places of a tile"
    checks = [ExactnessCheck("matrix products", not odd, detail)]
    odd = list(differing_places(base))
    detail = "; ".join(odd) or f"{len(base.pointwise)} kinds of operations, as the threads share them"
    checks.append(ExactnessCheck("single elements", not odd, detail))

    accepted = [BASE_TILE]
    for size in TILE_CLASSES:
        if size == BASE_TILE or size > budget or size > 2 * longest:
            continue
        batches = _batches(executor, min(max(size, BASE_TILE), longest))
        executor.tile_classes = (BASE_TILE,)
        expected = executor.forward(batches[1], capture_layers=True)
        executor.tile_classes = (size,)
        equal, small = True, size < BASE_TILE
        for skipped, batch in zip((3, 0), batches, strict=True):
            recorded = RecordedProducts()
            with recorded:
                found = executor.forward(batch, capture_layers=True)
            assert expected.layers is not None
            assert found.layers is not None
            equal &= torch.equal(found.logits[skipped:], expected.logits)
            equal &= torch.equal(found.layers[:, skipped:], expected.layers)
        if (
            equal
            and not any(differing_products(base | recorded))
            and not any(differing_places(recorded))
            and not (small and any(differing_pointwise(recorded)))
        ):
            accepted.append(size)
    executor.tile_classes = tuple(sorted(accepted))
    return executor.tile_classes, checks


def _batches(executor: Executor, length: int) -> tuple[PackedBatch, PackedBatch]:
    """A prefill of ``length`` rows behind three rows of another sequence, and the same alone; binds a storage for them.

    So a row's places in a tile differ between the two.
    """
    storage, tables = build_storage(executor, [3, length])
    executor.bind(storage)
    ids = random_ids(executor, 3 + length)
    spans = [RowSpan(ids[:3], 0, tables[0], 0), RowSpan(ids[3:], 0, tables[1], 0)]
    behind, alone = (
        PackedBatch.build(s, block_size=BLOCK_SIZE, scratch_block=storage.scratch_block) for s in (spans, spans[1:])
    )
    return behind, alone
