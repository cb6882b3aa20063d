"""How a step asks the ledger: the batch that goes to the executor, not the plan it was made from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from kvcache.ledger import Ledger
from kvcache.ledger_rows import Claim, ForwardRows, Ints
from kvcache.violation import LedgerError
from model.batch import PackedBatch
from specdec.drafters.base import Drafter
from specdec.sequence import Sequence

logger = logging.getLogger(__name__)


@runtime_checkable
class WritesTarget(Protocol):
    """A drafter that runs forwards of its own over the target's planes and lets ``ledger``, if set, check each."""

    ledger: Ledger | None


def check_forward(ledger: Ledger, batch: PackedBatch, drafted: Seq[tuple[Sequence, Seq[int]]]) -> None:
    """``batch`` is about to run for these sequences and their drafts. Logs and raises LedgerError."""
    _check(ledger.check, batch, drafted)


def check_draft_forward(ledger: Ledger, batch: PackedBatch, drafted: Seq[tuple[Sequence, Seq[int]]]) -> None:
    """``batch`` is about to run through the target's first layers, to draft on. Logs and raises LedgerError."""
    _check(ledger.check_draft, batch, drafted)


def watch(ledger: Ledger, drafters: Iterable[Drafter]) -> None:
    """Let ``ledger`` see the forwards of those drafters that write to the target's planes."""
    for drafter in drafters:
        if isinstance(drafter, WritesTarget):
            drafter.ledger = ledger


def _check(
    check: Callable[[ForwardRows, Seq[Claim]], None], batch: PackedBatch, drafted: Seq[tuple[Sequence, Seq[int]]]
) -> None:
    rows = ForwardRows(
        input_ids=_ints(batch.input_ids),
        positions=_ints(batch.positions),
        slots=_ints(batch.slot_mapping),
        row_starts=_ints(batch.row_starts),
        block_tables=_ints(batch.block_tables),
        block_size=batch.block_size,
    )
    claims = [Claim(sequence.seq_id, sequence.table, sequence.tokens, drafts) for sequence, drafts in drafted]
    try:
        check(rows, claims)
    except LedgerError as error:
        _log(error)
        raise


def settle(ledger: Ledger, sequences: Seq[Sequence]) -> None:
    """The outcome of that forward is applied to ``sequences``. Logs and raises LedgerError."""
    try:
        ledger.settle([sequence.tokens for sequence in sequences])
    except LedgerError as error:
        _log(error)
        raise


def _log(error: LedgerError) -> None:
    logger.error("%s", error, extra=error.violation.facts())


def _ints(tensor: Tensor) -> Ints:
    found: Ints = tensor.numpy().astype(np.int64, copy=False)
    return found
