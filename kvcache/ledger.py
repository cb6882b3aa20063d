"""The ledger: what was really written into every physical KV slot, and whether a forward reads what it should.

A debug mode. For each slot the ledger keeps who wrote it (sequence, position, token id), in which life of the block,
and a digest of all tokens that the writer had read up to there, since a position's KV depends on its whole prefix. It
does not trust block tables: which block belongs to whom it hears from pool and manager (kvcache.observer), what a
forward reads and writes it takes from the batch that goes to the executor, and what ought to stand at a position from
the sequence's own tokens::

    settled tokens + drafts  ->  token expected at position p  --+
    batch: block_tables[p]   ->  slot read for position p        +-- equal, or LedgerError
    ledger                   ->  what was written to that slot --+

    life of a slot: unwritten -> written (this step) -> verified | rolled back -> written again ..
                    drafted: written through the first layers only, for the drafts of this step alone
    A block that is given out anew begins another life: whatever its slots held counts as unwritten.

Same threads as the manager: whoever may use that may use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcache.ledger_rows import Claim, ForwardRows, StepView, look
from kvcache.table import BlockTable
from kvcache.violation import LedgerError, Violation

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WRITTEN, VERIFIED, ROLLED_BACK, DRAFTED = 1, 2, 3, 4
_STATES = {
    0: "unwritten",
    WRITTEN: "written in this step",
    VERIFIED: "verified",
    ROLLED_BACK: "rolled back",
    DRAFTED: "written through the first layers only",
}


class _Holder:
    """What the ledger knows of a table: the blocks it was given, in order, and how far they hold KV."""

    __slots__ = ("blocks", "generations", "length", "num_shared", "seq_id", "table", "unlawful")

    def __init__(self, table: BlockTable) -> None:
        self.table = table  # kept alive, so that its id is not used again
        self.blocks: list[int] = []
        self.generations: list[int] = []  # the life in which each block was given
        self.num_shared = 0  # leading blocks that came from the prefix cache
        self.unlawful: dict[int, str] = {}  # index of a shared block -> why it should not have been given
        self.length = 0  # leading positions with verified KV
        self.seq_id: int | None = None  # known from the first forward on


@dataclass(frozen=True, slots=True)
class _Open:
    """Rows of one sequence in a forward whose outcome is not settled."""

    holder: _Holder
    start: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Commit:
    holder: _Holder
    index: int
    block: int
    generation: int
    token_ids: tuple[int, ...]


class Ledger:
    """For one set of planes. Pass it to KVCacheManager as ``observer`` and to SpeculativeStep as ``ledger``.

    ``check`` before each forward, ``settle`` when its outcome is known; ``check_draft`` before a forward of the first
    layers that drafts for the step whose ``check`` comes next. About 40 bytes a slot; a check costs O(context of the
    batch).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.step = 0
        self.rows_checked = 0
        self.positions_checked = 0  # positions of contexts, each once a step
        self.draft_rows_checked = 0
        slots = num_blocks * block_size
        self._writer = np.full(slots, -1, dtype=np.int64)
        self._position = np.full(slots, -1, dtype=np.int64)
        self._token = np.full(slots, -1, dtype=np.int64)
        self._digest = np.zeros(slots, dtype=np.uint64)
        self._state = np.zeros(slots, dtype=np.uint8)
        self._written_in = np.full(slots, -1, dtype=np.int64)  # the block's generation when the slot was written
        self._generation = np.zeros(num_blocks, dtype=np.int64)
        self._references = np.zeros(num_blocks, dtype=np.int64)
        self._committed_in = np.full(num_blocks, -1, dtype=np.int64)
        self._salts: dict[int, bytes] = {}  # of committed blocks
        self._holders: dict[int, _Holder] = {}
        self._open: list[_Open] = []
        self._open_slots = np.empty(0, dtype=np.int64)
        self._drafted: list[Ints] = []  # slots that drafts of this step wrote
        self._commits: list[_Commit] = []

    # -- what pool and manager tell (kvcache.observer.CacheObserver) -----------------------------------------------

    def allocated(self, block: int) -> None:
        self._generation[block] += 1
        self._references[block] = 1

    def acquired(self, block: int) -> None:
        self._references[block] += 1

    def released(self, block: int) -> None:
        self._references[block] -= 1

    def granted(self, table: BlockTable, blocks: Sequence[int]) -> None:
        holder = self._holder(table)
        for block in blocks:
            holder.blocks.append(block)
            holder.generations.append(int(self._generation[block]))

    def shared(self, table: BlockTable, block: int) -> None:
        holder = self._holder(table)
        if self._committed_in[block] != self._generation[block]:
            holder.unlawful[len(holder.blocks)] = "never committed as verified"
        elif self._salts[block] != table.salt:
            holder.unlawful[len(holder.blocks)] = "committed under another salt"
        self.granted(table, (block,))
        holder.num_shared = len(holder.blocks)
        holder.length = holder.num_shared * self.block_size

    def returned(self, table: BlockTable, block: int) -> None:
        holder = self._holder(table)
        if block in holder.blocks:
            index = len(holder.blocks) - 1 - holder.blocks[::-1].index(block)
            del holder.blocks[index], holder.generations[index]
            holder.num_shared = min(holder.num_shared, len(holder.blocks))
            holder.length = min(holder.length, len(holder.blocks) * self.block_size)
        if not holder.blocks:
            del self._holders[id(table)]

    def committed(self, table: BlockTable, index: int, block: int, token_ids: Sequence[int]) -> None:
        holder = self._holder(table)
        self._commits.append(_Commit(holder, index, block, int(self._generation[block]), tuple(token_ids)))

    def _holder(self, table: BlockTable) -> _Holder:
        holder = self._holders.get(id(table))
        if holder is None:
            holder = self._holders[id(table)] = _Holder(table)
        return holder

    # -- what the step tells ---------------------------------------------------------------------------------------

    def check(self, rows: ForwardRows, claims: Sequence[Claim]) -> None:
        """``rows`` are about to run for ``claims``, in order. Raises LedgerError, having noted no write."""
        self._abandon()
        self.step += 1
        try:
            self._check_commits()
            view, holders = self._pass(rows, claims, WRITTEN)
        finally:
            self._end_drafts()
        self._open_slots = view.slots
        self._open = [
            _Open(holder, int(start), view.token_ids[begin:end].tolist())
            for holder, start, begin, end in zip(
                holders, view.starts, view.row_starts[:-1], view.row_starts[1:], strict=True
            )
        ]
        self.rows_checked += len(view.slots)
        self.positions_checked += len(view.read_slots)

    def check_draft(self, rows: ForwardRows, claims: Sequence[Claim]) -> None:
        """``rows`` are about to run through the first layers, to draft for the step whose ``check`` comes next.

        Later drafts of that step may read what they write; the step itself must write it again, in all layers. The
        claims' drafts are those so far. Raises LedgerError, having noted no write.
        """
        self._abandon()
        self.step += 1  # the step that they are for
        try:
            view, _ = self._pass(rows, claims, DRAFTED)
        finally:
            self.step -= 1
        self._drafted.append(view.slots)
        self.draft_rows_checked += len(view.slots)

    def settle(self, tokens: Sequence[Sequence[int]]) -> None:
        """The forward ran and its outcome is applied: ``tokens`` are those of each claim's sequence now.

        Rows whose token became part of their sequence are verified, the others are rolled back. Raises LedgerError
        if a block was committed that holds something else.
        """
        kept: list[bool] = []
        for rows, now in zip(self._open, tokens, strict=True):
            ids, known = rows.token_ids, now[rows.start : rows.start + len(rows.token_ids)]
            count = next((i for i, (a, b) in enumerate(zip(ids, known, strict=False)) if a != b), len(known))
            kept += [i < count for i in range(len(ids))]
            rows.holder.length = rows.start + count
        self._state[self._open_slots] = np.where(kept, VERIFIED, ROLLED_BACK)
        self._open.clear()
        self._check_commits()

    def describe(self, slot: int) -> str:
        """What the ledger knows of a slot, in words."""
        block = slot // self.block_size
        if self._written_in[slot] < 0:
            return "nothing written"
        what = f"token {self._token[slot]} of sequence {self._writer[slot]} at position {self._position[slot]}"
        if self._written_in[slot] != self._generation[block]:
            return f"{what}, left over from before block {block} was given out anew"
        return f"{what}, {_STATES[int(self._state[slot])]}"

    def _pass(self, rows: ForwardRows, claims: Sequence[Claim], state: int) -> tuple[StepView, list[_Holder]]:
        """Check ``rows`` and note what they write as ``state``."""
        holders = [self._claimant(claim, _first_slot(rows, s)) for s, claim in enumerate(claims)]
        view = look(rows, claims, [holder.length for holder in holders], self.num_blocks, self._raise)
        self._check_blocks(view, holders)
        self._check_writes(view)
        undo = self._write(view, state)
        try:
            self._check_reads(view, holders, state)
        except LedgerError:
            for array, before in undo:
                array[view.slots] = before
            raise
        return view, holders

    def _end_drafts(self) -> None:
        """What drafts wrote and the step did not write again is worth nothing to anybody."""
        for slots in self._drafted:
            self._state[slots[self._state[slots] == DRAFTED]] = ROLLED_BACK
        self._drafted.clear()

    def _abandon(self) -> None:
        """A forward whose outcome was never settled: whether it wrote is unknown."""
        if self._open:
            self._state[self._open_slots] = ROLLED_BACK
            self._open.clear()

    def _claimant(self, claim: Claim, slot: int) -> _Holder:
        """``slot``: where the claim's first row will be written."""
        holder = self._holder(claim.table)
        if holder.seq_id is None:
            holder.seq_id = claim.seq_id
        elif holder.seq_id != claim.seq_id:
            expected = f"a table of its own, not sequence {holder.seq_id}'s"
            self._raise("table of another", claim.seq_id, expected, "both", slot=slot)
        return holder

    def _check_commits(self) -> None:
        """Blocks that were committed must hold verified KV of what they were hashed by."""
        commits, self._commits = self._commits, []
        for commit in commits:
            block, first = commit.block, commit.index * self.block_size
            if commit.generation != self._generation[block]:
                continue  # given out anew since
            slots = block * self.block_size + np.arange(self.block_size)
            right = (
                (self._written_in[slots] == commit.generation)
                & (self._state[slots] == VERIFIED)
                & (self._position[slots] == np.arange(first, first + self.block_size))
                & (self._token[slots] == np.array(commit.token_ids, dtype=np.int64))
            )
            if not right.all():
                i = int(right.argmin())
                self._raise(
                    "commit of what is not verified",
                    -1 if commit.holder.seq_id is None else commit.holder.seq_id,
                    f"verified token {commit.token_ids[i]}",
                    self.describe(int(slots[i])),
                    position=first + i,
                    slot=int(slots[i]),
                )
            self._committed_in[block] = commit.generation
            self._salts[block] = commit.holder.table.salt

    def _check_blocks(self, view: StepView, holders: Sequence[_Holder]) -> None:
        """Every block that a row reads or writes was given to its sequence, and was not taken back since."""
        width = int(view.blocks.shape[1])
        granted, lives = (np.full((len(holders), width), -1, dtype=np.int64) for _ in range(2))
        for s, holder in enumerate(holders):
            count = min(len(holder.blocks), width)
            granted[s, :count] = holder.blocks[:count]
            lives[s, :count] = holder.generations[:count]
        used = np.arange(width) < view.num_blocks[:, None]
        inside = (view.blocks >= 0) & (view.blocks < self.num_blocks)
        safe = np.where(inside, view.blocks, 0)
        right = (view.blocks == granted) & (self._generation[safe] == lives) & (self._references[safe] > 0) & inside
        for s, holder in enumerate(holders):
            for index, why in holder.unlawful.items():
                if index < view.num_blocks[s]:
                    block = int(view.blocks[s, index])
                    self._raise_at(
                        "unverified block from the prefix cache",
                        view.seq_ids[s],
                        index * self.block_size,
                        block,
                        "a block that was committed as verified, under the same salt",
                        f"one {why}: {self.describe(block * self.block_size) if inside[s, index] else block}",
                    )
        wrong = used & ~right
        if not wrong.any():
            return
        s, index = divmod(int(wrong.argmax()), width)
        block, holder = int(view.blocks[s, index]), holders[s]
        expected = f"block {granted[s, index]}" if granted[s, index] >= 0 else f"{len(holder.blocks)} blocks at most"
        if not inside[s, index]:
            kind, found = "block outside of the pool", "the scratch block" if block == self.num_blocks else str(block)
        elif self._references[block] <= 0:
            kind, found = "freed block", f"block {block}, which was given back"
        elif any(
            b == block and g == self._generation[block] for b, g in zip(holder.blocks, holder.generations, strict=True)
        ):
            kind, found = "blocks out of order", f"block {block}, given for index {holder.blocks.index(block)}"
        else:
            kind, found = "foreign block", f"block {block} of {self._owners(block)}"
        self._raise_at(kind, view.seq_ids[s], index * self.block_size, block, expected, found)

    def _owners(self, block: int) -> str:
        life = self._generation[block]
        names = [
            "a sequence that has not run" if holder.seq_id is None else f"sequence {holder.seq_id}"
            for holder in self._holders.values()
            if any(b == block and g == life for b, g in zip(holder.blocks, holder.generations, strict=True))
        ]
        return ", ".join(names) or "nobody known"

    def _check_writes(self, view: StepView) -> None:
        """No row writes into a block that is committed or that others hold too."""
        blocks = view.slots // self.block_size
        shared = (self._references[blocks] > 1) | (self._committed_in[blocks] == self._generation[blocks])
        if shared.any():
            row = int(shared.argmax())
            self._raise_row("write into a committed block", view, row, "a block of its own, not committed")

    def _write(self, view: StepView, state: int) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Note the rows as written; returns what stood there before."""
        slots, sequences = view.slots, view.row_sequences
        # A row's KV depends on what it reads: the digest goes on from what stands before the sequence's first row.
        before = np.maximum(view.context_bounds[:-1] + view.starts - 1, 0)
        gap = np.where(view.starts > 0, self._digest[view.read_slots[before]] - view.digests[before], np.uint64(0))
        values: list[tuple[NDArray[Any], Any]] = [
            (self._writer, view.seq_ids[sequences]),
            (self._position, view.positions),
            (self._token, view.token_ids),
            (self._digest, view.digests[view.row_reads] + gap[sequences]),
            (self._state, state),
            (self._written_in, self._generation[slots // self.block_size]),
        ]
        undo = []
        for array, value in values:
            undo.append((array, array[slots]))
            array[slots] = value
        return undo

    def _check_reads(self, view: StepView, holders: Sequence[_Holder], written: int) -> None:
        """Every position of every row's context: the right token, of the right prefix, from a lawful writer.

        ``written`` is the state of what this forward writes, and may read beside what is verified.
        """
        slots, positions, sequences = view.read_slots, view.read_positions, view.read_sequences
        state = self._state[slots]
        given = np.array([holder.num_shared * self.block_size for holder in holders])
        checks: list[tuple[str, Bools]] = [
            ("unwritten slot", self._written_in[slots] != self._generation[slots // self.block_size]),
            ("drafted slot", (state == DRAFTED) & (written != DRAFTED)),
            ("rolled back slot", (state != VERIFIED) & (state != written) & (state != DRAFTED)),
            ("wrong position", self._position[slots] != positions),
            ("wrong token", self._token[slots] != view.read_tokens),
            ("foreign slot", (self._writer[slots] != view.seq_ids[sequences]) & (positions >= given[sequences])),
            ("other prefix", self._digest[slots] != view.digests),
        ]
        if not any(bad.any() for _, bad in checks):
            return
        i = int(np.logical_or.reduce([bad for _, bad in checks]).argmax())
        kind = next(name for name, bad in checks if bad[i])
        slot, position = int(slots[i]), int(positions[i])
        seq_id = int(view.seq_ids[sequences[i]])
        expected = f"token {view.read_tokens[i]} of sequence {seq_id} at position {position}"
        found = self.describe(slot)
        if kind == "other prefix":
            expected, found = f"{expected}, behind this sequence's tokens", f"{found}, behind other tokens"
        self._raise(kind, seq_id, expected, found, position=position, slot=slot)

    def _raise_row(self, kind: str, view: StepView, row: int, expected: str) -> None:
        slot = int(view.slots[row])
        self._raise(
            kind,
            int(view.seq_ids[view.row_sequences[row]]),
            expected,
            f"slot {slot} of {self._owners(slot // self.block_size)}",
            position=int(view.positions[row]),
            slot=slot,
        )

    def _raise_at(self, kind: str, seq_id: int, position: int, block: int, expected: str, found: str) -> None:
        self._raise(kind, int(seq_id), expected, found, position=position, slot=block * self.block_size)

    def _raise(
        self, kind: str, seq_id: int, expected: str, found: str, *, position: int = -1, slot: int = -1
    ) -> NoReturn:
        block, slot = (slot // self.block_size, slot) if slot >= 0 else (-1, -1)
        raise LedgerError(Violation(kind, self.step, seq_id, position, block, slot, expected, found))


def _first_slot(rows: ForwardRows, s: int) -> int:
    """Where the first row of sequence ``s`` of the batch is written; -1 if the batch has no such row."""
    row = int(rows.row_starts[s]) if s < len(rows.row_starts) else -1
    return int(rows.slots[row]) if 0 <= row < len(rows.slots) else -1
