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
    A block that is given out anew begins another life: whatever its slots held counts as unwritten.

Same threads as the manager: whoever may use that may use this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvcache.ledger_rows import Claim, ForwardRows, StepView, digests, look
from kvcache.table import BlockTable

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WRITTEN, VERIFIED, ROLLED_BACK = 1, 2, 3
_STATES = {0: "unwritten", WRITTEN: "written in this step", VERIFIED: "verified", ROLLED_BACK: "rolled back"}


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that a forward would have done wrong. Plain data; -1 where a number does not apply."""

    kind: str  # see docs/exactness.md
    step: int  # checked forwards, from 1
    seq_id: int
    position: int
    block: int
    slot: int
    expected: str
    found: str

    def __str__(self) -> str:
        where = "".join(
            f", {name} {value}"
            for name, value in (("position", self.position), ("block", self.block), ("slot", self.slot))
            if value >= 0
        )
        return (
            f"ledger, step {self.step}: {self.kind}: sequence {self.seq_id}{where}: "
            f"expected {self.expected}, found {self.found}"
        )

    def facts(self) -> dict[str, Any]:
        """For a structured log line."""
        return {f"ledger_{name}": value for name, value in asdict(self).items()}


class LedgerError(RuntimeError):
    """A forward that must not run, or a commit that must not stand."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation


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
    token_ids: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class _Commit:
    holder: _Holder
    index: int
    block: int
    generation: int
    token_ids: tuple[int, ...]


class Ledger:
    """For one set of planes. Pass it to KVCacheManager as ``observer`` and to SpeculativeStep as ``ledger``.

    ``check`` before each forward, ``settle`` when its outcome is known. About 40 bytes a slot; a check costs
    O(context of the batch).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.step = 0
        self.rows_checked = 0
        self.positions_checked = 0  # positions of contexts, each once a step
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
        self._check_commits()
        holders = [self._claimant(claim) for claim in claims]
        view = look(rows, claims, [holder.length for holder in holders], self.num_blocks, self._raise)
        self._check_blocks(view, holders)
        self._check_writes(view)
        undo = self._write(view)
        try:
            self._check_reads(view, holders)
        except LedgerError:
            for array, before in undo:
                array[view.slots] = before
            raise
        for s, holder in enumerate(holders):
            part = slice(int(view.row_starts[s]), int(view.row_starts[s + 1]))
            self._open.append(_Open(holder, int(view.starts[s]), view.token_ids[part], view.slots[part]))
        self.rows_checked += len(view.slots)
        self.positions_checked += len(view.read_slots)

    def settle(self, tokens: Sequence[Sequence[int]]) -> None:
        """The forward ran and its outcome is applied: ``tokens`` are those of each claim's sequence now.

        Rows whose token became part of their sequence are verified, the others are rolled back. Raises LedgerError
        if a block was committed that holds something else.
        """
        for rows, now in zip(self._open, tokens, strict=True):
            known = np.asarray(now[rows.start : rows.start + len(rows.token_ids)], dtype=np.int64)
            same = known == rows.token_ids[: len(known)]
            kept = len(same) if same.all() else int(same.argmin())
            self._state[rows.slots[:kept]] = VERIFIED
            self._state[rows.slots[kept:]] = ROLLED_BACK
            rows.holder.length = rows.start + kept
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

    def _abandon(self) -> None:
        """A forward whose outcome was never settled: whether it wrote is unknown."""
        for rows in self._open:
            self._state[rows.slots] = ROLLED_BACK
        self._open.clear()

    def _claimant(self, claim: Claim) -> _Holder:
        holder = self._holder(claim.table)
        if holder.seq_id is None:
            holder.seq_id = claim.seq_id
        elif holder.seq_id != claim.seq_id:
            self._raise("table of another", claim.seq_id, f"a table of its own, not sequence {holder.seq_id}'s", "both")
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
                    block=block,
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
        """No row writes what is committed or shared, and no two rows write the same slot."""
        blocks = view.slots // self.block_size
        shared = (self._references[blocks] > 1) | (self._committed_in[blocks] == self._generation[blocks])
        if shared.any():
            row = int(shared.argmax())
            self._raise_row("write into a committed block", view, row, "a block of its own, not committed")
        _, first, counts = np.unique(view.slots, return_index=True, return_counts=True)
        if len(first) < len(view.slots):
            slot = view.slots[first[counts > 1][0]]
            row = int(np.flatnonzero(view.slots == slot)[1])
            self._raise_row("two rows write one slot", view, row, "a slot of its own")

    def _write(self, view: StepView) -> list[tuple[NDArray[Any], NDArray[Any]]]:
        """Note the rows as written; returns what stood there before."""
        slots, first = view.slots, view.row_starts[:-1]
        before_start = np.where(
            view.starts > 0, view.read_slots[np.maximum(view.context_starts + view.starts - 1, 0)], 0
        )
        base = np.where(view.starts > 0, self._digest[before_start], np.uint64(0))
        new = digests(view.positions, view.token_ids, view.row_starts) + np.repeat(base, np.diff(view.row_starts))
        values: list[tuple[NDArray[Any], NDArray[Any]]] = [
            (self._writer, view.seq_ids[view.row_sequences]),
            (self._position, view.positions),
            (self._token, view.token_ids),
            (self._digest, new),
            (self._state, np.full(len(slots), WRITTEN, dtype=np.uint8)),
            (self._written_in, self._generation[slots // self.block_size]),
        ]
        assert len(first) == len(view.seq_ids)
        undo = []
        for array, value in values:
            undo.append((array, array[slots]))
            array[slots] = value
        return undo

    def _check_reads(self, view: StepView, holders: Sequence[_Holder]) -> None:
        """Every position of every row's context: the right token, of the right prefix, from a lawful writer."""
        slots, positions = view.read_slots, view.read_positions
        state = self._state[slots]
        own = self._writer[slots] == view.seq_ids[view.read_sequences]
        given = positions < (np.array([h.num_shared for h in holders]) * self.block_size)[view.read_sequences]
        checks: list[tuple[str, Bools]] = [
            ("unwritten slot", self._written_in[slots] != self._generation[slots // self.block_size]),
            ("rolled back slot", (state != VERIFIED) & (state != WRITTEN)),
            ("wrong position", self._position[slots] != positions),
            ("wrong token", self._token[slots] != view.read_tokens),
            ("foreign slot", ~(own | given)),
            ("other prefix", self._digest[slots] != digests(positions, view.read_tokens, view.context_bounds)),
        ]
        wrong = np.logical_or.reduce([bad for _, bad in checks])
        if not wrong.any():
            return
        i = int(wrong.argmax())
        kind = next(name for name, bad in checks if bad[i])
        slot, position = int(slots[i]), int(positions[i])
        seq_id = int(view.seq_ids[view.read_sequences[i]])
        expected = f"token {view.read_tokens[i]} of sequence {seq_id} at position {position}"
        if kind == "other prefix":
            expected += ", behind this sequence's tokens"
        found = self.describe(slot) + (", behind other tokens" if kind == "other prefix" else "")
        self._raise(kind, seq_id, expected, found, position=position, block=slot // self.block_size, slot=slot)

    def _raise_row(self, kind: str, view: StepView, row: int, expected: str) -> None:
        slot = int(view.slots[row])
        self._raise(
            kind,
            int(view.seq_ids[view.row_sequences[row]]),
            expected,
            f"slot {slot} of {self._owners(slot // self.block_size)}",
            position=int(view.positions[row]),
            block=slot // self.block_size,
            slot=slot,
        )

    def _raise_at(self, kind: str, seq_id: int, position: int, block: int, expected: str, found: str) -> None:
        self._raise(kind, int(seq_id), expected, found, position=position, block=block, slot=block * self.block_size)

    def _raise(
        self, kind: str, seq_id: int, expected: str, found: str, *, position: int = -1, block: int = -1, slot: int = -1
    ) -> NoReturn:
        raise LedgerError(Violation(kind, self.step, seq_id, position, block, slot, expected, found))
