"""The checks of the exactness probe: rows of whole forwards, compared bit for bit with the same rows alone.

One sequence is long (the token budget), some have a context that ends just before a border of attention chunks::

    long      0 ............................................ budget - 1
    others    context | 7 new rows            context 5, 62, 126, 254: chunk borders at 64, 128, 256 lie inside

The new rows are computed one by one first; then they, and the long sequence, come in every company that could matter:
the numbers of rows are those of model.probe_sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.exactness import ExactnessCheck
from model.interface import Executor, ForwardOutput
from model.probe_sizes import EVERY, row_counts

BLOCK_SIZE = 16
_CONTEXTS = (0, 5, 62, 126, 254)
_NEW_ROWS = 7  # per sequence: together enough for every count of ordinary decode and verify steps
_PLACES = 16  # shifts by one row: a tile's width on torch, more than the kernels' blocks of rows
_REFERENCE_ROWS = 16  # the long sequence's reference runs so many rows at a time, from position 0 on
_REFERENCE_LATER = (256, 64)  # from this position on, so many
_ALONE = (1, 15, 16, 63, 64, 127, 128, 129, 255, 256)  # positions of it that are also run alone
_OFFSETS = (
    (1, 16),
    (13, 24),
    (17, 16),
    (33, 31),
    (62, 3),
    (63, 24),
    (127, 3),
    (250, 13),
    (9, 32),
    (70, 33),
)  # start, rows
_LOGITS_CLASS = 65  # of this class, all rows' logits are compared


@dataclass(frozen=True, slots=True)
class _Piece:
    """``count`` rows of sequence ``s`` from position ``start`` on; logits for the last ``logits`` of them."""

    s: int
    start: int
    count: int
    logits: int


class RowChecks:
    """Binds a small storage of its own to ``executor``; the caller binds another when done."""

    def __init__(self, executor: Executor, budget: int) -> None:
        self._executor = executor
        longest = executor.info.max_model_len
        self._budget = max(1, min(budget, longest))
        self._new_rows = min(_NEW_ROWS, longest)
        self._starts = [c for c in _CONTEXTS if c + _NEW_ROWS <= longest] or [0]
        lengths = [max(self._budget, self._new_rows), *(c + self._new_rows for c in self._starts[1:])]
        self._storage, self._tables = build_storage(executor, lengths)
        executor.bind(self._storage)
        ids = random_ids(executor, sum(lengths))
        self._tokens: list[list[int]] = []
        for length in lengths:
            self._tokens.append(ids[:length])
            ids = ids[length:]
        self._counts = row_counts(executor, self._budget)
        self._most_decoded = min(EVERY, self._new_rows * len(self._starts))  # larger counts need a prefill
        self._alone: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}  # (sequence, position)
        self._reference = torch.empty(0)  # [L, N, H] of the long sequence
        self._planes: dict[str, Tensor] = {}  # what the storage held when all was well

    def run(self) -> Iterator[ExactnessCheck]:
        self._prepare()
        finite = all(bool(torch.isfinite(logits).all()) for logits, _ in self._alone.values())
        yield ExactnessCheck("finite logits", finite, f"of {len(self._alone)} rows decoded alone")
        yield from self._row_counts()
        yield self._each_place()
        yield self._positions_alone()
        larger = [count for count in self._counts if count > self._most_decoded]
        for turn, count in enumerate(larger):
            yield self._with_prefill(count, turn)
        yield from self._offsets()

    # -- references ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        for s, start in enumerate(self._starts):
            for first in range(0, start, self._budget):
                self._forward([_Piece(s, first, min(self._budget, start - first), 0)])
        layers = []
        length = len(self._tokens[0])
        for first, count in _reference_pieces(length):
            out = self._forward([_Piece(0, first, count, 0)], capture=True)
            assert out.layers is not None
            layers.append(out.layers)
        self._reference = torch.cat(layers, dim=1)
        for s, start in enumerate(self._starts):
            for i in range(self._new_rows):
                self._run_alone(s, start + i)
        self._planes = {name: self._storage.plane(name).clone() for name in self._storage.names}

    def _run_alone(self, s: int, position: int) -> None:
        if (s, position) not in self._alone:
            out = self._forward([_Piece(s, position, 1, 1)])
            self._alone[s, position] = out.logits[0], None if out.hidden is None else out.hidden[0]

    # -- the checks ------------------------------------------------------------------------------------------------

    def _row_counts(self) -> list[ExactnessCheck]:
        """Batches of few rows. If all of them contradict the rows alone but not each other, T = 1 is the odd one."""
        together = self._new_rows * len(self._starts)
        counts = [c for c in self._counts if c <= self._most_decoded]
        checks = [self._decode_rows(_rows(count), count, turn=count) for count in counts]
        larger = [check for check, count in zip(checks, counts, strict=True) if count > 1]
        if len(larger) < 2 or together > self._budget or any(check.passed for check in larger):
            return checks
        kept = dict(self._alone)
        pieces = self._turn(together, 0, 0)
        out = self._forward(pieces)
        for i, key in enumerate(_wanted(pieces)):
            self._alone[key] = out.logits[i], None if out.hidden is None else out.hidden[i]
        again = [self._decode_rows(_rows(count), count, turn=count) for count in counts if count > 1]
        if not all(check.passed for check in again):
            self._alone = kept
            return checks
        largest = max(_difference(kept[key][0], logits) for key, (logits, _) in self._alone.items())
        odd = f"a row alone differs from itself in any larger batch, and those agree; logits by up to {largest:.3g}"
        return [ExactnessCheck(_rows(1), False, odd), *again]

    def _each_place(self) -> ExactnessCheck:
        """Sixteen batches that differ by one row of shift: each row at each place of a tile."""
        count = min(_PLACES, self._new_rows * len(self._starts))
        checks = [self._decode_rows("", count, turn=turn, first=turn % 3) for turn in range(_PLACES)]
        failed = [check.detail for check in checks if not check.passed]
        return ExactnessCheck("each place in a tile", not failed, (failed or [checks[0].detail])[0])

    def _positions_alone(self) -> ExactnessCheck:
        """Rows of the long sequence, at chunk borders and elsewhere, alone and in the pieces of its reference."""
        length = len(self._tokens[0])
        positions = sorted({p for p in (*_ALONE, length - 1) if p < length})
        odd = []
        for position in positions:
            out = self._forward([_Piece(0, position, 1, 0)], capture=True)
            assert out.layers is not None
            if not torch.equal(out.layers[:, 0], self._reference[:, position]):
                odd.append((position, _difference(out.layers[:, 0], self._reference[:, position])))
        self._restore(bool(odd))
        name = "1 row and small pieces"
        if not odd:
            return ExactnessCheck(name, True, f"{len(positions)} positions compared")
        largest = max(difference for _, difference in odd)
        return ExactnessCheck(
            name,
            False,
            f"{len(odd)} of {len(positions)} positions differ, the first is position {odd[0][0]}, layer outputs by up "
            f"to {largest:.3g}",
        )

    def _with_prefill(self, count: int, turn: int) -> ExactnessCheck:
        """A prefill from position 0 among rows of the other sequences, ``count`` rows in all."""
        others: list[_Piece] = []
        left = count // 2
        for s in range(1, len(self._starts)):
            taken = min(self._new_rows, left)
            if taken:
                others.append(_Piece(s, self._starts[s], taken, taken))
                left -= taken
        length = min(count - sum(piece.count for piece in others), len(self._tokens[0]))
        prefill = _Piece(0, 0, length, length if count == _LOGITS_CLASS else 1)
        before = turn % (len(others) + 1)
        self._run_alone(0, length - 1)
        pieces = [*others[:before], prefill, *others[before:]]
        total = sum(piece.count for piece in pieces)
        return self._long_rows(f"{_rows(total)} with a prefill of {length}", pieces, before)

    def _offsets(self) -> Iterator[ExactnessCheck]:
        """Pieces of the long sequence that begin anywhere, as chunked prefill cuts them, alone and behind a row."""
        for turn, (start, count) in enumerate(_OFFSETS):
            count = min(count, len(self._tokens[0]) - start, self._budget - 1)
            if count < 1:
                continue
            piece = _Piece(0, start, count, 0)
            front = [_Piece(len(self._starts) - 1, self._starts[-1], 1, 1)] if turn % 2 and start > 5 else []
            yield self._long_rows(f"{_rows(count)} from position {start} on", [*front, piece], len(front))

    # -- comparisons -----------------------------------------------------------------------------------------------

    def _turn(self, count: int, turn: int, first: int) -> list[_Piece]:
        """``count`` new rows of the sequences in turn, beginning with sequence ``turn`` at its row ``first``."""
        pieces: list[_Piece] = []
        for i in range(len(self._starts)):
            s = (turn + i) % len(self._starts)
            skipped = min(first, self._new_rows - 1) if i == 0 else 0
            taken = min(self._new_rows - skipped, count)
            if taken > 0:
                pieces.append(_Piece(s, self._starts[s] + skipped, taken, taken))
                count -= taken
        return pieces

    def _decode_rows(self, name: str, count: int, *, turn: int, first: int = 0) -> ExactnessCheck:
        pieces = self._turn(count, turn, first)
        return self._judge(name, pieces, self._forward(pieces), [])

    def _long_rows(self, name: str, pieces: list[_Piece], at: int) -> ExactnessCheck:
        """Layer outputs of ``pieces[at]``, of the long sequence, and all that :meth:`_judge` compares."""
        piece = pieces[at]
        row = sum(p.count for p in pieces[:at])
        out = self._forward(pieces, capture=True)
        assert out.layers is not None
        found = out.layers[:, row : row + piece.count]
        expected = self._reference[:, piece.start : piece.start + piece.count]
        different = (found != expected).any(-1)  # [L, count]
        notes = []
        if bool(different.any()):
            rows = different.any(0).nonzero().flatten().tolist()
            layer = int(different[:, rows[0]].nonzero()[0])
            notes.append(
                f"{len(rows)} of {piece.count} rows differ from themselves in small pieces, the first is "
                f"row {row + rows[0]} (position {piece.start + rows[0]}) from layer {layer} on, layer "
                f"outputs by up to {_difference(found, expected):.3g}"
            )
        return self._judge(name, pieces, out, notes, compared=piece.count)

    def _odd_planes(self, pieces: list[_Piece]) -> list[str]:
        """What the rows wrote, against what they wrote before: the first plane in which it differs."""
        parts = []
        for piece in pieces:
            where = torch.arange(piece.start, piece.start + piece.count)
            table = torch.tensor(self._tables[piece.s], dtype=torch.int64)
            parts.append(table[where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE)
        slots = torch.cat(parts).to(self._executor.info.device)
        for name, plane in self._planes.items():
            if not torch.equal(self._storage.plane(name)[slots], plane[slots]):
                return [f"what the rows wrote into the KV plane {name} differs from what they wrote alone"]
        return []

    def _judge(
        self, name: str, pieces: list[_Piece], out: ForwardOutput, notes: list[str], *, compared: int = 0
    ) -> ExactnessCheck:
        """Compare the wanted logits, and the keys and values, with those of the rows alone; ``notes`` say what else
        was found to differ."""
        odd, largest, known = [], 0.0, 0
        rows = _rows_of(pieces)
        for i, key in enumerate(_wanted(pieces)):
            if key not in self._alone:
                continue
            known += 1
            logits, hidden = self._alone[key]
            equal = torch.equal(out.logits[i], logits)
            if hidden is not None and out.hidden is not None:
                equal &= torch.equal(out.hidden[i], hidden)
            if not equal:
                odd.append((rows[key], key[1]))
                largest = max(largest, _difference(out.logits[i], logits))
        if odd:
            notes = [
                f"{len(odd)} of {known} rows differ from themselves alone, the first is row {odd[0][0]} "
                f"(position {odd[0][1]}), logits by up to {largest:.3g}",
                *notes,
            ]
        notes = notes or self._odd_planes(pieces)
        self._restore(bool(notes))
        return ExactnessCheck(name, not notes, "; ".join(notes) or f"{max(known, compared)} rows compared")

    def _restore(self, needed: bool) -> None:
        """After a check that failed: its rows may have left wrong keys and values, which no other check should see."""
        for name, plane in self._planes.items() if needed else ():
            self._storage.plane(name).copy_(plane)

    def _forward(self, pieces: list[_Piece], *, capture: bool = False) -> ForwardOutput:
        spans = [
            RowSpan(self._tokens[p.s][p.start : p.start + p.count], p.start, self._tables[p.s], p.count - p.logits)
            for p in pieces
        ]
        batch = PackedBatch.build(spans, block_size=BLOCK_SIZE, scratch_block=self._storage.scratch_block)
        return self._executor.forward(batch, capture_layers=capture)


def _reference_pieces(length: int) -> Iterator[tuple[int, int]]:
    """(first position, rows) of the pieces in which the long sequence's reference is computed."""
    later, rows = _REFERENCE_LATER
    first = 0
    while first < length:
        count = min(_REFERENCE_ROWS if first < later else rows, length - first)
        yield first, count
        first += count


def _wanted(pieces: Sequence[_Piece]) -> list[tuple[int, int]]:
    """(sequence, position) of the logits rows."""
    return [(p.s, p.start + i) for p in pieces for i in range(p.count - p.logits, p.count)]


def _rows_of(pieces: Sequence[_Piece]) -> dict[tuple[int, int], int]:
    """Row in the batch by (sequence, position)."""
    keys = [(p.s, p.start + i) for p in pieces for i in range(p.count)]
    return {key: row for row, key in enumerate(keys)}


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def build_storage(executor: Executor, lengths: Sequence[int]) -> tuple[KVStorage, list[list[int]]]:
    """A storage for sequences of these lengths, and their block tables, scattered over it."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    storage = KVStorage(executor.planes, num_blocks=sum(counts), block_size=BLOCK_SIZE, device=executor.info.device)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = []
    for count in counts:
        tables.append(order[:count])
        order = order[count:]
    return storage, tables


def random_ids(executor: Executor, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(2)
    ids: list[int] = torch.randint(
        0, executor.info.embedding_rows, (count,), generator=generator, dtype=torch.int64
    ).tolist()
    return ids
