"""The exactness probe: does row i of a packed batch have the bits of the same row alone, on this machine?

The level is measured and reported, never assumed:

- L0: every comparison was bit-equal, so answers do not depend on batch mates, chunking, drafts or cache hits.
- L2: some were not, so equal only up to near-ties of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.generic import BASE_TILE, TILE_CLASSES
from model.interface import Executor, TiledExecutor

_CONTEXTS = (0, 5, 62, 126, 254)  # rows already there: chunk borders at 64, 128 and 256 lie inside the new rows
_NEW_ROWS = 5  # per sequence
_BLOCK_SIZE = 16
_ROW_COUNTS = (1, 2, 3, 5, 8, 13, 16, 17)


@dataclass(frozen=True, slots=True)
class ExactnessCheck:
    name: str  # e.g. "17 rows"
    passed: bool
    detail: str  # what was compared, and how much of it differed


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """What the probe found. Plain data."""

    level: Literal["L0", "L2"]
    checks: tuple[ExactnessCheck, ...]
    detail: str  # one line for people
    tile_classes: tuple[int, ...] = ()  # that a tiled executor may use; empty for the others

    def with_checks(self, checks: Sequence[ExactnessCheck]) -> ExactnessReport:
        """This report and more checks: one that failed takes the level down and stands in the detail."""
        failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
        detail = "; ".join([*failed, self.detail])
        return replace(self, level="L2" if failed else self.level, checks=(*self.checks, *checks), detail=detail)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Row ``i`` of one of the probe's sequences: ``tokens[start + i]``."""

    tokens: list[int]
    start: int
    blocks: list[int]

    def span(self, count: int, *, first: int = 0, logits_from: int = 0) -> RowSpan:
        at = self.start + first
        return RowSpan(self.tokens[at : at + count], at, self.blocks, logits_from)


def probe_exactness(executor: Executor, storage: KVStorage | None = None, *, budget: int = 512) -> ExactnessReport:
    """Measure ``executor`` with batches of up to ``budget`` rows and the thread count as configured.

    Runs on a small storage of its own and binds ``storage`` again at the end, if given. A tiled executor uses the
    tile classes that passed from then on. Takes about 60 small forwards and two of ``budget`` rows.
    """
    try:
        tiles = _measure_tiles(executor, budget) if isinstance(executor, TiledExecutor) else ()
        checks = tuple(_Probe(executor, budget).run())
    finally:
        if storage is not None:
            executor.bind(storage)
    failed = [check for check in checks if not check.passed]
    if failed:
        first = f"{failed[0].name}: {failed[0].detail}"
        detail = f"{len(failed)} of {len(checks)} checks found rows that depend on their batch: {first}"
    else:
        detail = f"{len(checks)} checks, every row bit-equal to itself alone ({torch.get_num_threads()} threads)"
    return ExactnessReport("L2" if failed else "L0", checks, detail, tiles)


class _Probe:
    def __init__(self, executor: Executor, budget: int) -> None:
        self._executor = executor
        longest = executor.info.max_model_len
        self._budget = max(1, min(budget, longest))
        contexts = [c for c in _CONTEXTS if c + _NEW_ROWS <= longest] or [0]
        self._new_rows = min(_NEW_ROWS, longest)
        lengths = [max(self._budget, c + self._new_rows) if c == 0 else c + self._new_rows for c in contexts]
        self._storage, tables = _build_storage(executor, lengths)
        executor.bind(self._storage)
        ids = _random_ids(executor, sum(lengths))
        self._sequences: list[_Rows] = []
        for context, length, blocks in zip(contexts, lengths, tables, strict=True):
            self._sequences.append(_Rows(ids[:length], context, blocks))
            ids = ids[length:]
        self._alone: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}

    def run(self) -> Iterator[ExactnessCheck]:
        warm = [RowSpan(s.tokens[: s.start], 0, s.blocks, s.start) for s in self._sequences if s.start]
        if warm:
            self._forward(warm)
        for s, sequence in enumerate(self._sequences):
            for i in range(self._new_rows):
                logits, hidden = self._forward([sequence.span(1, first=i)])
                self._alone[s, i] = logits[0], None if hidden is None else hidden[0]
        finite = all(bool(torch.isfinite(logits).all()) for logits, _ in self._alone.values())
        yield ExactnessCheck("finite logits", finite, "of one-row decodes")
        together = self._new_rows * len(self._sequences)
        for count in sorted({*(c for c in _ROW_COUNTS if c <= min(self._budget, together)), together}):
            yield self._packed(f"{count} rows", count, turn=count)
        # One row after the other at the same place in the tile: sixteen batches that differ by one row of shift.
        shifts = [self._packed("", min(BASE_TILE, together), turn=turn, first=turn % 3) for turn in range(BASE_TILE)]
        failed = [check for check in shifts if not check.passed]
        yield ExactnessCheck("each place in a tile", not failed, (failed or shifts)[0].detail)
        for count in sorted({31, 64, self._budget}):
            if together < count <= self._budget + together:
                yield self._with_prefill(count, together)

    def _packed(self, name: str, count: int, *, turn: int, first: int = 0) -> ExactnessCheck:
        """``count`` rows of the sequences in turn, starting with sequence ``turn`` at its row ``first``."""
        spans: list[RowSpan] = []
        keys: list[tuple[int, int]] = []
        order = [(turn + i) % len(self._sequences) for i in range(len(self._sequences))]
        starts = {s: first if i == 0 else 0 for i, s in enumerate(order)}
        for s in order:
            taken = min(self._new_rows - starts[s], count - len(keys))
            if taken > 0:
                spans.append(self._sequences[s].span(taken, first=starts[s]))
                keys += [(s, starts[s] + i) for i in range(taken)]
        return self._compare(name, spans, keys)

    def _with_prefill(self, count: int, together: int) -> ExactnessCheck:
        """A prefill from position 0 beside the rows of the other sequences, ``count`` rows in all."""
        others = range(1, len(self._sequences))
        prefill = self._sequences[0]
        length = max(self._new_rows + 1, count - self._new_rows * len(others))
        length = min(length, len(prefill.tokens))
        spans = [self._sequences[s].span(self._new_rows) for s in others]
        keys = [(s, i) for s in others for i in range(self._new_rows)]
        middle = len(spans) // 2
        spans.insert(middle, prefill.span(length, logits_from=length - 1))
        keys.insert(middle * self._new_rows, (0, length - 1))
        name = f"{sum(len(span.token_ids) for span in spans)} rows with a prefill of {length}"
        packed = self._forward(spans)
        logits, hidden = self._forward([prefill.span(1, first=length - 1)])
        self._alone[0, length - 1] = logits[0], None if hidden is None else hidden[0]
        return self._judge(name, packed, keys)

    def _compare(self, name: str, spans: list[RowSpan], keys: list[tuple[int, int]]) -> ExactnessCheck:
        return self._judge(name, self._forward(spans), keys)

    def _judge(self, name: str, packed: tuple[Tensor, Tensor | None], keys: list[tuple[int, int]]) -> ExactnessCheck:
        logits, hidden = packed
        different, largest = 0, 0.0
        for row, key in enumerate(keys):
            alone, alone_hidden = self._alone[key]
            equal = torch.equal(logits[row], alone)
            if hidden is not None and alone_hidden is not None:
                equal &= torch.equal(hidden[row], alone_hidden)
            if not equal:
                different += 1
                largest = max(largest, float((logits[row] - alone).abs().max()))
        detail = f"{len(keys)} rows compared"
        if different:
            detail = f"{different} of {len(keys)} rows differ from themselves alone, logits by up to {largest:.3g}"
        return ExactnessCheck(name, different == 0, detail)

    def _forward(self, spans: list[RowSpan]) -> tuple[Tensor, Tensor | None]:
        batch = PackedBatch.build(spans, block_size=_BLOCK_SIZE, scratch_block=self._storage.scratch_block)
        out = self._executor.forward(batch)
        return out.logits, out.hidden


def _measure_tiles(executor: TiledExecutor, budget: int) -> tuple[int, ...]:
    """Which larger tiles give the bits of the base tile, layer by layer; ``executor`` uses them from now on."""
    executor.tile_classes = (BASE_TILE,)
    longest = executor.info.max_model_len
    accepted = [BASE_TILE]
    for size in TILE_CLASSES:
        length = min(size, longest)
        if size == BASE_TILE or size > budget or size > 2 * longest:
            continue
        storage, tables = _build_storage(executor, [3, length])
        executor.bind(storage)
        ids = _random_ids(executor, 3 + length)
        # Three rows of another sequence first, so that the rows' places in both tilings differ.
        spans = [RowSpan(ids[:3], 0, tables[0], 0), RowSpan(ids[3:], 0, tables[1], 0)]
        batches = [
            PackedBatch.build(s, block_size=_BLOCK_SIZE, scratch_block=storage.scratch_block)
            for s in (spans, spans[1:])
        ]
        executor.tile_classes = (BASE_TILE,)
        expected = executor.forward(batches[1], capture_layers=True)
        executor.tile_classes = (size,)
        equal = True
        for skipped, batch in zip((3, 0), batches, strict=True):
            found = executor.forward(batch, capture_layers=True)
            assert expected.layers is not None
            assert found.layers is not None
            equal &= torch.equal(found.logits[skipped:], expected.logits)
            equal &= torch.equal(found.layers[:, skipped:], expected.layers)
        if equal:
            accepted.append(size)
    executor.tile_classes = tuple(accepted)
    return executor.tile_classes


def _build_storage(executor: Executor, lengths: Sequence[int]) -> tuple[KVStorage, list[list[int]]]:
    """A storage for sequences of these lengths, and their block tables, interleaved."""
    counts = [-(-length // _BLOCK_SIZE) for length in lengths]
    storage = KVStorage(executor.planes, num_blocks=sum(counts), block_size=_BLOCK_SIZE, device=executor.info.device)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return storage, tables


def _random_ids(executor: Executor, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    ids: list[int] = torch.randint(
        0, executor.info.embedding_rows, (count,), generator=generator, dtype=torch.int64
    ).tolist()
    return ids
