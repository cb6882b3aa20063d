"""The ledger and drafts of the target's first layers: each forward is checked, and the step reads nothing they left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import specdec.drafters.exit_drafter
import specdec.step
from kvcache.violation import LedgerError, Violation
from model.batch import PackedBatch, RowSpan
from specdec.drafters.base import DraftRequest
from specdec.ledger_hook import check_draft_forward
from tests.specdec.exit_builders import GREEDY, ExitBench, ExitToy

K, SIZE = 3, 2


def running(toy: ExitToy | None = None) -> ExitBench:
    """Three sequences in the middle of decoding."""
    bench = ExitBench(toy, num_layers=1, k=K, block_size=SIZE)
    bench.decoding(replace(GREEDY, max_tokens=40))
    bench.run_step()
    return bench


def caught(bench: ExitBench) -> Violation:
    """What the next step ends with; no sequence has changed."""
    before = [(list(s.tokens), s.num_computed) for s in bench.sequences.values()]
    with pytest.raises(LedgerError) as raised:
        bench.run_step()
    assert [(list(s.tokens), s.num_computed) for s in bench.sequences.values()] == before
    assert raised.value.violation.step == len(bench.steps) + 1
    return raised.value.violation


def plant(
    monkeypatch: pytest.MonkeyPatch, where: object, change: Callable[[RowSpan], RowSpan], call: int, index: int = 1
) -> None:
    """In its ``call``-th batch (from 0) ``where`` packs another span for sequence ``index``."""
    build, calls = PackedBatch.build, []

    class Faulty:
        @staticmethod
        def build(spans: list[RowSpan], **sizes: int) -> PackedBatch:
            calls.append(0)
            if len(calls) == call + 1:
                spans = [change(span) if i == index else span for i, span in enumerate(spans)]
            return build(spans, **sizes)

    monkeypatch.setattr(where, "PackedBatch", Faulty)


def test_every_draft_row_is_checked_and_right_code_passes() -> None:
    toy = ExitToy()
    bench = running(toy)
    bench.run()
    assert bench.ledger.draft_rows_checked == sum(toy.exits) > 0
    assert bench.ledger.rows_checked == sum(step.stats.num_rows for step in bench.steps)
    assert bench.ledger.step == len(bench.steps)
    assert 0 < bench.num_accepted < bench.num_drafted


@pytest.mark.parametrize(("call", "off"), [(0, 1), (0, -1), (1, 1), (1, -1), (2, -1)])
def test_a_draft_row_at_a_wrong_position(call: int, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    sequence = bench.sequences[1]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + K + 2)
    plant(monkeypatch, specdec.drafters.exit_drafter, lambda span: replace(span, start=span.start + off), call)
    violation = caught(bench)
    # Behind the first round the draft's own token stands where the row should: the position has another one, or none.
    assert (violation.kind, violation.seq_id) == ("input id" if call else "position id", 1)
    assert violation.position == len(sequence.tokens) - 1 + call + off
    assert bench.step.num_drafter_failures == 0


def test_a_draft_row_with_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    plant(monkeypatch, specdec.drafters.exit_drafter, lambda span: replace(span, token_ids=[39]), call=1)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.found) == ("input id", 1, "token 39")


def test_a_draft_row_in_another_sequences_block(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    others = bench.sequences[0].table.blocks
    plant(
        monkeypatch,
        specdec.drafters.exit_drafter,
        lambda span: replace(span, blocks=[others[0], *span.blocks[1:]]),
        call=1,
    )
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.block) == ("foreign block", 1, others[0])


def test_a_draft_row_over_committed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    sequence = bench.sequences[1]
    bench.ledger._holders[id(sequence.table)].length = 0  # else it is seen sooner
    plant(monkeypatch, specdec.drafters.exit_drafter, lambda span: RowSpan(sequence.tokens[:1], 0, span.blocks, 0), 0)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("write into a committed block", 1, 0)


def test_a_verify_forward_that_does_not_write_a_drafted_slot_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    sequence, due = bench.sequences[1], bench.sequences[1].num_computed
    plant(monkeypatch, specdec.step, lambda span: RowSpan(span.token_ids[1:], due + 1, span.blocks, 0), call=0)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("drafted slot", 1, due)
    assert violation.slot == sequence.table.slot(due)
    assert violation.found.endswith("written through the first layers only")


def test_a_draft_reads_what_an_earlier_one_wrote_in_its_own_step_alone() -> None:
    bench = running()
    sequence = bench.sequences[1]
    token = bench.ask(1)[1][0]

    def go_on() -> None:
        """The second round of a draft, whose first one was before."""
        span = RowSpan([token], len(sequence.tokens), sequence.table.blocks, 0)
        batch = PackedBatch.build([span], block_size=SIZE, scratch_block=bench.storage.scratch_block)
        check_draft_forward(bench.ledger, batch, [(sequence, [token])])

    go_on()
    bench.run_step(limits=dict.fromkeys(bench.sequences, 0))
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 1)
    with pytest.raises(LedgerError) as raised:
        go_on()
    assert (raised.value.violation.kind, raised.value.violation.position) == ("rolled back slot", sequence.num_computed)


def test_a_step_that_fails_after_its_drafts_leaves_the_ledger_right() -> None:
    toy = ExitToy()
    bench = running(toy)
    forward = toy.forward

    def fails(batch: PackedBatch, **options: object) -> object:
        if options.get("num_layers") is None:
            raise RuntimeError("planted")
        return forward(batch, **options)  # type: ignore[arg-type]

    toy.forward = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="planted"):
        bench.run_step()
    toy.forward = forward  # type: ignore[method-assign]
    bench.run()
    assert all(result.error is None for result in bench.results.values())


def test_a_violation_undoes_what_its_draft_would_have_written(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    before = bench.ledger._state.copy(), bench.ledger._token.copy()
    sequence = bench.sequences[1]
    bench.ledger._digest[sequence.table.slot(0)] ^= 1  # computed behind other tokens, it seems
    for one in bench.sequences.values():
        assert bench.manager.reserve(one.table, len(one.tokens) + K)
    with pytest.raises(LedgerError) as raised:
        bench.drafter.propose([DraftRequest(one, K) for one in bench.sequences.values()])
    assert raised.value.violation.kind == "other prefix"
    assert all((a == b).all() for a, b in zip((bench.ledger._state, bench.ledger._token), before, strict=True))
