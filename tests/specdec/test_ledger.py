"""The ledger catches a fault of each kind, planted in the step, the batch, the tables, the pool or the prefix cache."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import specdec.step
from kvcache.prefix import PrefixEntry, PrefixHasher
from kvcache.violation import LedgerError, Violation
from model.batch import PackedBatch, RowSpan
from specdec.params import SamplingParams
from specdec.sequence import Sequence
from tests.specdec.builders import Bench, ScriptedDrafter

PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=40)
PROMPTS = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17])
WRONG = 39  # drafted always, said by the model never (checked below)
K, SIZE = 5, 2


def running(steps: int = 2) -> Bench:
    """Two sequences in the middle of decoding; every draft so far was rejected."""
    bench = Bench(drafter=ScriptedDrafter(lambda sequence, limit: [WRONG] * limit), k=K, block_size=SIZE)
    for prompt in PROMPTS:
        bench.add(prompt, PARAMS)
    for _ in range(steps):
        stats = bench.run_step().stats
        assert stats.rollback_tokens == K * len(PROMPTS)
    bench.manager.check_integrity = lambda tables: None  # type: ignore[method-assign]  # the ledger has to find it
    return bench


def caught(bench: Bench) -> Violation:
    """What the next step ends with. No forward may have run, nor anything have changed."""
    before = [(list(s.tokens), s.num_computed) for s in bench.sequences.values()]
    with pytest.raises(LedgerError) as raised:
        bench.run_step()
    assert [(list(s.tokens), s.num_computed) for s in bench.sequences.values()] == before
    violation = raised.value.violation
    assert violation.step == len(bench.steps) + 1
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(f"ledger, step {violation.step}: {violation.kind}: sequence {violation.seq_id}")
    for name in ("position", "block", "slot"):
        value = getattr(violation, name)
        assert (f", {name} {value}" in text) == (value >= 0)
    assert f"expected {violation.expected}, found {violation.found}" in text
    assert_placed(violation)
    return violation


def assert_placed(violation: Violation) -> None:
    """It names slot and block; only rows that cannot be told apart have none."""
    if violation.kind == "rows":
        assert (violation.block, violation.slot) == (-1, -1)
    else:
        assert 0 <= violation.slot // SIZE == violation.block


def plant_spans(monkeypatch: pytest.MonkeyPatch, change: Callable[[RowSpan], RowSpan], index: int = 0) -> None:
    """The step packs another span for its sequence ``index``."""
    build = PackedBatch.build

    def faulty(spans: list[RowSpan], **sizes: int) -> PackedBatch:
        return build([change(span) if i == index else span for i, span in enumerate(spans)], **sizes)

    monkeypatch.setattr(specdec.step.PackedBatch, "build", faulty)


def plant_batch(monkeypatch: pytest.MonkeyPatch, **change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The step's batch has other tensors."""
    build = PackedBatch.build

    def faulty(spans: list[RowSpan], **sizes: int) -> PackedBatch:
        batch = build(spans, **sizes)
        return dataclasses.replace(batch, **{name: edit(getattr(batch, name)) for name, edit in change.items()})

    monkeypatch.setattr(specdec.step.PackedBatch, "build", faulty)


def expected_slot(sequence: Sequence, position: int) -> tuple[int, int]:
    return sequence.table.blocks[position // SIZE], sequence.table.slot(position)


def test_right_code_passes_and_everything_is_looked_at() -> None:
    bench = running()
    assert bench.ledger.step == 2
    assert bench.ledger.rows_checked == sum(step.stats.num_rows for step in bench.steps)
    # Step 1 reads the prompts and their drafts, step 2 one token more.
    assert bench.ledger.positions_checked == sum(2 * len(prompt) + 1 + 2 * K for prompt in PROMPTS)
    bench.run()
    assert all(WRONG not in result.token_ids for result in bench.results.values())


@pytest.mark.parametrize("off", [1, -1])
def test_positions_off_by_one_after_a_rejection(off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    due = bench.sequences[0].num_computed
    blocks = bench.manager.reserve(bench.sequences[0].table, due + K + 2)
    assert blocks
    plant_spans(monkeypatch, lambda span: replace(span, start=span.start + off))
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("position id", 0, due + off)
    assert violation.expected == f"position {due}"
    assert violation.found == f"position {due + off} (token {bench.sequences[0].tokens[-1]})"
    assert (violation.block, violation.slot) == expected_slot(bench.sequences[0], due + off)


def test_a_token_that_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    tokens, due = bench.sequences[0].tokens, bench.sequences[0].num_computed
    plant_spans(monkeypatch, lambda span: replace(span, start=due - 1, token_ids=[tokens[due - 1], *span.token_ids]))
    violation = caught(bench)
    assert (violation.kind, violation.position, violation.expected) == ("position id", due - 1, f"position {due}")
    assert (violation.block, violation.slot) == expected_slot(bench.sequences[0], due - 1)


def test_another_input_id_than_the_sequences_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    plant_spans(monkeypatch, lambda span: replace(span, token_ids=[38, *span.token_ids[1:]]), index=1)
    violation = caught(bench)
    last = bench.sequences[1].tokens[-1]
    assert (violation.kind, violation.seq_id) == ("input id", 1)
    assert (violation.expected, violation.found) == (f"token {last}", "token 38")
    assert (violation.block, violation.slot) == expected_slot(bench.sequences[1], violation.position)


def test_a_stale_slot_read_after_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    sequence, due = bench.sequences[1], bench.sequences[1].num_computed
    # The row that would write the rejected draft's position again is lost.
    plant_spans(monkeypatch, lambda span: RowSpan(span.token_ids[1:], due + 1, span.blocks, 0), index=1)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("rolled back slot", 1, due)
    assert (violation.block, violation.slot) == expected_slot(sequence, due)
    assert violation.expected == f"token {sequence.tokens[-1]} of sequence 1 at position {due}"
    assert violation.found == f"token {WRONG} of sequence 1 at position {due}, rolled back"


def test_a_hole_that_was_never_written() -> None:
    bench = running(0)
    bench.sequences[0].num_computed = 3  # as after a prefix hit that there was not
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("unwritten slot", 0, 0)
    assert violation.found == "nothing written"


def test_a_table_that_was_not_truncated_while_its_block_went_to_another() -> None:
    bench = running(0)

    def truncate(table: object, num_tokens: int) -> int:
        keep = -(-num_tokens // SIZE)
        for block in table.blocks[keep:][::-1]:  # type: ignore[attr-defined]
            bench.manager._pool.release(block)  # the pool has it again, the table still names it
        return 0

    bench.manager.truncate = truncate  # type: ignore[method-assign, assignment]
    bench.run_step({0: 5})
    kept, position = bench.sequences[0].table.blocks[-1], 5 // SIZE * SIZE + SIZE
    bench.run_step({1: 7})
    assert kept in bench.sequences[1].table.blocks
    violation = caught(bench)
    assert (violation.kind, violation.seq_id) == ("foreign block", 0)
    assert violation.position >= position
    assert violation.found == f"block {violation.block} of sequence 1"


def test_a_freed_block_that_is_still_in_a_table() -> None:
    bench = running()
    for sequence in bench.sequences.values():  # nothing is given out in the next step
        assert bench.manager.reserve(sequence.table, sequence.num_computed + 1 + K)
    bench.manager._pool.release(block := bench.sequences[1].table.blocks[-1])
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.block) == ("freed block", 1, block)
    assert violation.expected == f"block {block}"
    assert violation.found == f"block {block}, which was given back"


def test_two_sequences_with_one_block_because_a_table_says_so() -> None:
    bench = running()
    block = bench.sequences[0].table.blocks[1]
    bench.sequences[1].table.blocks[0] = block
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("foreign block", 1, 0)
    assert violation.found == f"block {block} of sequence 0"


def test_two_sequences_with_one_block_because_the_pool_gave_it_twice() -> None:
    bench = running()
    block = bench.sequences[0].table.blocks[-1]
    bench.manager._pool._free.append(block)
    assert bench.manager.reserve(bench.sequences[1].table, bench.sequences[1].table.num_slots + 1)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.block) == ("foreign block", 0, block)
    assert violation.found == f"block {block} of sequence 1"


def test_two_sequences_on_one_table() -> None:
    bench = running()
    bench.sequences[1].table = bench.sequences[0].table
    violation = caught(bench)
    assert (violation.kind, violation.seq_id) == ("table of another", 1)
    assert "sequence 0" in violation.expected
    assert violation.slot == bench.sequences[1].table.slot(bench.sequences[1].num_computed)


def test_blocks_in_another_order_than_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    plant_spans(monkeypatch, lambda span: replace(span, blocks=[span.blocks[1], span.blocks[0], *span.blocks[2:]]))
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("blocks out of order", 0, 0)
    assert violation.found == f"block {violation.block}, given for index 1"


def test_a_context_that_reaches_into_the_scratch_block(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    scratch = bench.storage.scratch_block

    def blank(tables: torch.Tensor) -> torch.Tensor:
        tables[1, 0] = scratch
        return tables

    plant_batch(monkeypatch, block_tables=blank)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.found) == ("block outside of the pool", 1, "the scratch block")


def test_a_slot_mapping_that_is_not_where_the_position_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()

    def shift(slots: torch.Tensor) -> torch.Tensor:
        slots[1] += 1
        return slots

    plant_batch(monkeypatch, slot_mapping=shift)
    violation = caught(bench)
    position = bench.sequences[0].num_computed + 1
    slot = bench.sequences[0].table.slot(position)
    assert (violation.kind, violation.seq_id, violation.position) == ("slot mapping", 0, position)
    assert (violation.slot, violation.found) == (slot + 1, f"slot {slot + 1}")
    assert violation.expected == f"slot {slot}, from which the position is read"


def test_a_block_table_that_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    plant_batch(monkeypatch, block_tables=lambda tables: tables[:, :2])
    violation = caught(bench)
    due = bench.sequences[0].num_computed  # the first row that has no block
    assert (violation.kind, violation.seq_id, violation.position) == ("block table too short", 0, due)
    assert (violation.block, violation.slot) == expected_slot(bench.sequences[0], due)


def test_rows_given_to_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    plant_batch(monkeypatch, row_starts=lambda starts: starts + torch.tensor([0, 1, 0], dtype=torch.int32))
    assert (violation := caught(bench)).kind == "input id", violation
    plant_batch(monkeypatch, row_starts=lambda starts: starts[:2])
    bench.steps.append(bench.steps[0])  # a step was counted
    assert caught(bench).kind == "rows"


def test_dummy_rows_write_to_the_scratch_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running()
    scratch = bench.storage.scratch_block * SIZE
    forward = bench.executor.forward
    seen = []

    def without_dummies(batch: PackedBatch) -> object:
        seen.append(batch.num_rows)
        rows = int(batch.row_starts[-1])
        cut = {name: getattr(batch, name)[:rows] for name in ("input_ids", "positions", "slot_mapping")}
        return forward(dataclasses.replace(batch, **cut))

    def pad(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: torch.cat([tensor, torch.tensor([value])])

    bench.executor.forward = without_dummies  # type: ignore[method-assign, assignment]
    plant_batch(monkeypatch, input_ids=pad(0), positions=pad(0), slot_mapping=pad(scratch + 1))
    rows = bench.run_step().stats.num_rows
    assert seen == [rows]
    assert rows == (K + 1) * len(PROMPTS) + 1
    plant_batch(monkeypatch, slot_mapping=lambda slots: torch.cat([slots[:-1], torch.tensor([3])]))
    violation = caught(bench)
    assert (violation.kind, violation.slot) == ("dummy row", 3)


def test_a_token_that_changed_after_it_was_computed() -> None:
    bench = running()
    was = bench.sequences[0].tokens[1]
    bench.sequences[0].tokens[1] = 38
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("wrong token", 0, 1)
    assert violation.expected.startswith("token 38 ")
    assert violation.found == f"token {was} of sequence 0 at position 1, verified"


def test_a_slot_that_another_sequence_wrote() -> None:
    bench = running()
    _, slot = expected_slot(bench.sequences[0], 3)
    bench.ledger._writer[slot] = 1  # as if a kernel had
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position, violation.slot) == ("foreign slot", 0, 3, slot)


# -- the prefix cache ---------------------------------------------------------------------------------------------


def admit(bench: Bench, prompt: list[int], *, salt: bytes = b"", all_of_it: bool = False) -> Sequence:
    """A sequence that begins behind what the prefix cache has of ``prompt``."""
    sequence = bench.sequences[bench.add(prompt, PARAMS)]
    sequence.table = bench.manager.new_table(salt)
    hits = bench.manager.match_prefix(sequence.table, prompt, len(prompt) - (not all_of_it))
    assert hits > 0
    sequence.num_computed = min(hits, len(prompt) - 1)
    return sequence


def test_a_prefix_hit_is_a_lawful_foreign_read() -> None:
    bench = running()
    admit(bench, [*PROMPTS[0], 1])
    bench.run()


def test_a_block_that_the_prefix_cache_hands_out_unverified() -> None:
    bench = running()
    sequence = bench.sequences[0]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 3 * SIZE)
    block = sequence.table.blocks[-1]  # lookahead: it holds nothing, or rejected drafts
    root, packed = bench.manager._hasher.root(b""), bytes([7, *[0] * 7, 8, *[0] * 7])
    bench.manager._pool.register(block, bench.manager._hasher.extend(root, packed), None, b"", packed)
    bench.manager.truncate(sequence.table, len(sequence.tokens))
    new = admit(bench, [7, 8, 9])
    violation = caught(bench)
    assert (violation.kind, violation.seq_id) == ("unverified block from the prefix cache", new.seq_id)
    assert (violation.position, violation.block, violation.slot) == (0, block, block * SIZE)
    assert "never committed" in violation.found


def test_a_commit_of_rejected_drafts() -> None:
    bench = running()
    commit = bench.manager.commit
    sequence = bench.sequences[0]
    known = len(sequence.tokens)

    def too_much(table: object, tokens: list[int], num_tokens: int) -> None:
        drafted = [*tokens[:known], *[WRONG] * K]
        commit(sequence.table, drafted, len(drafted)) if table is sequence.table else None

    bench.manager.commit = too_much  # type: ignore[method-assign, assignment]
    with pytest.raises(LedgerError) as raised:
        bench.run_step({0: 1})
    violation = raised.value.violation
    assert (violation.kind, violation.seq_id) == ("commit of what is not verified", 0)
    assert known <= violation.position < known + K
    assert (violation.block, violation.slot) == expected_slot(sequence, violation.position)
    assert_placed(violation)
    assert (violation.expected, violation.step) == (f"verified token {WRONG}", 3)
    assert violation.found.endswith("rolled back")


def test_a_block_of_another_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHasher, "root", lambda self, salt: b"one root for all")
    monkeypatch.setattr(PrefixEntry, "holds", lambda self, parent, salt, packed: self.packed_ids == packed)
    bench = running()
    new = admit(bench, [*PROMPTS[0], 1], salt=b"tenant")
    violation = caught(bench)
    assert (violation.kind, violation.seq_id) == ("unverified block from the prefix cache", new.seq_id)
    assert "another salt" in violation.found


def test_a_block_that_was_computed_behind_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHasher, "extend", lambda self, parent, packed: self._hash(packed))
    monkeypatch.setattr(PrefixEntry, "holds", lambda self, parent, salt, packed: self.packed_ids == packed)
    bench = running()
    new = admit(bench, [*PROMPTS[0][:2], *PROMPTS[1][2:4], 1])  # block 0 of one, block 1 of the other
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("other prefix", new.seq_id, 2)
    assert violation.found.endswith("behind other tokens")


def test_a_block_hashed_for_other_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixHasher, "extend", lambda self, parent, packed: self._hash(packed))
    monkeypatch.setattr(PrefixEntry, "holds", lambda self, parent, salt, packed: self.packed_ids == packed)
    bench = running()
    new = admit(bench, [*PROMPTS[1][2:4], 1])
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("wrong position", new.seq_id, 0)
    assert "at position 2, verified" in violation.found


def test_a_prefix_hit_that_leaves_no_row_to_compute() -> None:
    bench = running()
    new = admit(bench, PROMPTS[0][:4], all_of_it=True)
    violation = caught(bench)
    assert (violation.kind, violation.seq_id, violation.position) == ("write into a committed block", new.seq_id, 3)


# -- what a violation leaves behind -------------------------------------------------------------------------------


def test_a_violation_is_logged_with_its_facts(caplog: pytest.LogCaptureFixture) -> None:
    bench = running()
    bench.sequences[0].tokens[1] = 38
    with caplog.at_level(logging.ERROR):
        violation = caught(bench)
    (record,) = [record for record in caplog.records if record.name == "specdec.ledger_hook"]
    assert record.getMessage() == str(violation)
    for name, value in violation.facts().items():
        assert getattr(record, name) == value


def test_the_others_go_on_after_a_violation() -> None:
    bench = running()
    bench.sequences[0].tokens[1] = 38
    caught(bench)
    bench.drop(0)
    bench.run()
    assert bench.results[1].finish_reason == "length"


def test_a_forward_that_failed_leaves_slots_that_count_as_unwritten() -> None:
    bench = running()
    forward = bench.executor.forward

    def fail(batch: PackedBatch) -> None:
        raise RuntimeError("device lost")

    bench.executor.forward = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="device lost"):
        bench.run_step()
    bench.executor.forward = forward  # type: ignore[method-assign]
    sequence = bench.sequences[0]
    sequence.num_computed += 1  # as if it had run
    sequence.tokens.append(1)
    violation = caught_after_failure(bench)
    assert (violation.kind, violation.position) == ("rolled back slot", sequence.num_computed - 1)


def caught_after_failure(bench: Bench) -> Violation:
    with pytest.raises(LedgerError) as raised:
        bench.run_step()
    return raised.value.violation
