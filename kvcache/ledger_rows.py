"""What a forward will do, laid out flat for the ledger, once the batch's own arrays are found to make sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.table import BlockTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The tensors of the batch that goes to the executor (model.batch.PackedBatch), as numpy arrays."""

    input_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    row_starts: Ints  # [S + 1]; rows behind the last are dummies
    block_tables: Ints  # [S, max_blocks]
    block_size: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What a sequence of the batch says of itself: its tokens so far, and what was drafted behind them."""

    seq_id: int
    table: BlockTable  # whose blocks they are; its contents are not looked at
    tokens: Sequence[int]
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepView:
    """``T`` rows of ``S`` sequences; ``C`` positions of their contexts, each sequence's 0 .. its newest row."""

    seq_ids: Ints  # [S]
    starts: Ints  # [S] position of the first row
    row_starts: Ints  # [S + 1]
    row_sequences: Ints  # [T] index of the sequence
    row_reads: Ints  # [T] index of the row's own position among the contexts
    positions: Ints  # [T]
    token_ids: Ints  # [T]
    slots: Ints  # [T]
    blocks: Ints  # [S, max_blocks]
    num_blocks: Ints  # [S] blocks that the context takes
    context_bounds: Ints  # [S + 1]
    read_sequences: Ints  # [C]
    read_positions: Ints  # [C]
    read_slots: Ints  # [C]
    read_tokens: Ints  # [C] what must stand there
    digests: NDArray[np.uint64]  # [C] of the tokens up to there


class Raise(Protocol):
    """Raises LedgerError."""

    def __call__(
        self,
        kind: str,
        seq_id: int,
        expected: str,
        found: str,
        *,
        position: int = ...,
        slot: int = ...,
    ) -> NoReturn: ...


def look(rows: ForwardRows, claims: Sequence[Claim], lengths: Sequence[int], num_blocks: int, fail: Raise) -> StepView:
    """Lay out ``rows``. ``lengths``: leading positions of each sequence that have verified KV.

    Calls ``fail`` for rows that do not fit the claims, a position id or a token that is not the one to come, and a
    row that would be written to another slot than the one from which its position is read.
    """
    size, starts = rows.block_size, rows.row_starts
    counts = starts[1:] - starts[:-1]
    if len(counts) != len(claims) or len(rows.block_tables) != len(claims) or starts[0] != 0 or (counts < 1).any():
        fail("rows", -1, f"rows of {len(claims)} sequences", f"row_starts {starts.tolist()}")
    num_rows = int(starts[-1])
    dummies = rows.slots[num_rows:]
    stray = dummies[(dummies < num_blocks * size) | (dummies >= (num_blocks + 1) * size)]
    if num_rows > len(rows.slots) or len(stray):
        found = f"slots {dummies.tolist()} behind {num_rows} rows"
        fail("dummy row", -1, "slots of the scratch block", found, slot=int(stray[0]) if len(stray) else -1)
    seq_ids = np.array([claim.seq_id for claim in claims], dtype=np.int64)
    sequences = np.repeat(np.arange(len(claims)), counts)
    positions, ids, slots = rows.positions[:num_rows], rows.input_ids[:num_rows], rows.slots[:num_rows]

    # Position ids follow on each other and on what is verified. The last known token always runs again: its logits are
    # wanted. Rows that begin too far to the right are left to the check of the reads, which finds the hole.
    first = positions[starts[:-1]]
    offsets = np.arange(num_rows) - starts[sequences]
    due = np.array([min(n, len(c.tokens) - 1) for n, c in zip(lengths, claims, strict=True)], dtype=np.int64)
    totals = np.array([len(c.tokens) + len(c.drafts) for c in claims], dtype=np.int64)

    def check_rows(wrong: NDArray[np.bool_]) -> None:
        """Fail for a row that is wrong, if there is one."""
        if not wrong.any():
            return
        # What reaches too far may have gone wrong before: the first of the sequence's rows with a wrong token tells.
        s = int(sequences[wrong.argmax()])
        for row in range(int(starts[s]), int(wrong.argmax()) + 1):
            position = int(positions[row])
            if wrong[row] or _span(claims[s], position, 1) != [int(ids[row])]:
                _fail_row(claims[s], int(due[s] + offsets[row]), position, int(ids[row]), int(slots[row]), fail)

    wrong = (positions != (first[sequences] + offsets)) | (positions < (due[sequences] + offsets))
    check_rows(wrong | (positions >= totals[sequences]))

    ends = first + counts
    bounds = np.zeros(len(claims) + 1, dtype=np.int64)
    np.cumsum(ends, out=bounds[1:])
    tokens = np.fromiter(chain.from_iterable(map(_known, claims, ends.tolist())), np.int64, int(bounds[-1]))
    row_reads = bounds[sequences] + positions
    check_rows(tokens[row_reads] != ids)

    read_sequences = np.repeat(np.arange(len(claims)), ends)
    read_positions = np.arange(bounds[-1]) - bounds[read_sequences]
    tables = rows.block_tables
    needed = -(-ends // size)
    if (needed > tables.shape[1]).any():
        s = int((needed > tables.shape[1]).argmax())
        without = tables.shape[1] * size  # the first position without a block; a row of this step may write it
        row = int(starts[s]) + max(0, without - int(first[s]))
        fail(
            "block table too short",
            int(seq_ids[s]),
            f"{needed[s]} blocks",
            f"{tables.shape[1]}",
            position=int(positions[row]),
            slot=int(slots[row]),
        )
    read_slots = tables[read_sequences, read_positions // size] * size + read_positions % size
    written = read_slots[row_reads]
    if (written != slots).any():
        row = int((written != slots).argmax())
        fail(
            "slot mapping",
            int(seq_ids[sequences[row]]),
            f"slot {written[row]}, from which the position is read",
            f"slot {slots[row]}",
            position=int(positions[row]),
            slot=int(slots[row]),
        )
    return StepView(
        seq_ids=seq_ids,
        starts=first,
        row_starts=starts,
        row_sequences=sequences,
        row_reads=row_reads,
        positions=positions,
        token_ids=ids,
        slots=slots,
        blocks=tables,
        num_blocks=needed,
        context_bounds=bounds,
        read_sequences=read_sequences,
        read_positions=read_positions,
        read_slots=read_slots,
        read_tokens=tokens,
        digests=digests(read_positions, tokens, bounds),
    )


def _fail_row(claim: Claim, due: int, position: int, token: int, slot: int, fail: Raise) -> None:
    """The position or the token of the row that writes ``slot`` is wrong: which of the two?"""
    here = _span(claim, position, 1) if position >= 0 else []
    if position != due and (here == [token] or _span(claim, due, 1) == [token]):
        found = f"position {position} (token {token})"
        fail("position id", claim.seq_id, f"position {due}", found, position=position, slot=slot)
    expected = f"token {here[0] if here else 'none'}"
    fail("input id", claim.seq_id, expected, f"token {token}", position=position, slot=slot)


def _span(claim: Claim, begin: int, count: int) -> list[int]:
    """Tokens at positions ``begin`` .., drafts behind the known ones."""
    known = len(claim.tokens)
    return [*claim.tokens[begin : begin + count], *claim.drafts[max(0, begin - known) : max(0, begin + count - known)]]


def _known(claim: Claim, count: int) -> Sequence[int]:
    """The first ``count`` tokens."""
    return claim.tokens[:count] if count <= len(claim.tokens) else _span(claim, 0, count)


def digests(positions: Ints, token_ids: Ints, bounds: Ints) -> NDArray[np.uint64]:
    """For each entry a digest of all (position, token) up to it, from the start of its part (``bounds``) on.

    Sums of mixed 64-bit words: the difference of two is the digest of what stands between.
    """
    mixed = _mix(positions, token_ids)
    sums: NDArray[np.uint64] = np.cumsum(mixed, dtype=np.uint64)
    before = np.concatenate([np.zeros(1, dtype=np.uint64), sums])[bounds[:-1]]
    found: NDArray[np.uint64] = sums - np.repeat(before, np.diff(bounds))
    return found


def _mix(positions: Ints, token_ids: Ints) -> NDArray[Any]:
    """splitmix64's finaliser."""
    x: NDArray[Any] = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = x ^ ((token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return x
