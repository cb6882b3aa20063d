"""Any schedule of steps, spells without drafts, preemptions, prefix hits and failures: the draft model's KV is right.

Right means: its logits at every row that drafts are those of a fresh forward over all the tokens that the row follows.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from specdec.params import SamplingParams
from specdec.sequence import Sequence
from tests.specdec.builders import ToyExecutor
from tests.specdec.draft_builders import PARAMS, DraftBench, DraftToy, spoil_unknown

NUM_BLOCKS, MOST_SEQUENCES, LONGEST = 48, 4, 90
SIZES = {"layers": 1, "width": 4, "vocab_size": 12}


class DraftedSequences(RuleBasedStateMachine):
    """The target drafts for itself, so every draft must be accepted, whatever came before."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4]),
        k=st.integers(1, 5),
        max_rows=st.sampled_from([2, 7, 64]),
        max_catch_up=st.sampled_from([1, 5, 64]),
    )
    def start(self, block_size: int, k: int, max_rows: int, max_catch_up: int) -> None:
        draft = DraftToy(**SIZES)
        self.bench = DraftBench(
            draft,
            target=ToyExecutor(**SIZES),
            k=k,
            block_size=block_size,
            num_blocks=NUM_BLOCKS * 4 // block_size,
            max_rows=max_rows,
            max_catch_up=max_catch_up,
        )
        self.fresh = Fresh()
        draft.logit_hook = self.check
        self.waiting: dict[int, Sequence] = {}  # preempted
        self.failures = 0

    def check(self, logits: np.ndarray, token_ids: list[int]) -> None:
        assert np.array_equal(logits, self.fresh.logits(tuple(token_ids))), token_ids

    @precondition(lambda self: len(self.bench.sequences) + len(self.waiting) < MOST_SEQUENCES)
    @rule(data=st.data(), params=st.sampled_from(PARAMS[:4]), tail=st.lists(st.integers(0, 11), min_size=1, max_size=9))
    def come(self, data: st.DataObject, params: SamplingParams, tail: list[int]) -> None:
        """A prompt that begins like a sequence that there is."""
        known = [list(sequence.tokens) for sequence in self.bench.sequences.values()]
        stem = data.draw(st.sampled_from([[], *known]))
        stem = stem[: data.draw(st.integers(0, min(len(stem), 40)))]
        self.bench.resume(self.bench.add([*stem, *tail], params))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Everybody moves on, with drafts or without, some in chunks."""
        running = self.bench.sequences
        if not running:
            return
        limits = {s: data.draw(st.sampled_from([0, self.bench.k, self.bench.k, 1])) for s in running}
        chunks = {s: data.draw(st.sampled_from([99, 99, 5])) for s in running}
        self.run(chunks, limits)

    @precondition(lambda self: self.bench.sequences)
    @rule()
    def spell(self) -> None:
        for _ in range(3):
            self.run(dict.fromkeys(self.bench.sequences, 99), dict.fromkeys(self.bench.sequences, 0))

    @precondition(lambda self: self.bench.sequences)
    @rule(rounds=st.integers(0, 3))
    def fail(self, rounds: int) -> None:
        """The draft model fails in one of its rounds."""
        self.bench.draft.fail_after = rounds
        self.run(dict.fromkeys(self.bench.sequences, 99), {})
        self.bench.draft.fail_after = None
        self.failures = self.bench.step.num_drafter_failures

    @precondition(lambda self: self.bench.sequences)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.bench.sequences)))
        self.bench.preempt(seq_id)
        self.waiting[seq_id] = self.bench.sequences.pop(seq_id)

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        seq_id = next(iter(self.waiting))
        self.bench.sequences[seq_id] = self.waiting.pop(seq_id)
        self.bench.resume(seq_id)

    @precondition(lambda self: self.bench.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.bench.drop(data.draw(st.sampled_from(sorted(self.bench.sequences))))

    @precondition(lambda self: self.bench.sequences)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        """To ask what is missing changes nothing, and what is there is not missing."""
        sequence = self.bench.sequences[data.draw(st.sampled_from(sorted(self.bench.sequences)))]
        assert self.bench.manager.reserve(sequence.table, len(sequence.tokens))
        missing = self.bench.drafter.num_missing(sequence)
        assert missing is not None
        assert 0 <= missing < len(sequence.tokens)
        assert self.bench.drafter.num_missing(sequence) == missing

    @invariant()
    def every_draft_is_accepted(self) -> None:
        if hasattr(self, "bench"):
            assert self.bench.num_accepted == self.bench.num_drafted
            assert self.bench.step.num_drafter_failures == self.failures

    def run(self, chunks: dict[int, int], limits: dict[int, int]) -> None:
        for seq_id in [s for s, sequence in self.bench.sequences.items() if len(sequence.tokens) > LONGEST]:
            self.bench.drop(seq_id)
            chunks.pop(seq_id, None)
        if self.bench.sequences:
            spoil_unknown(self.bench)
            self.bench.run_step(chunks, limits)


class Fresh:
    """The draft model's logits from one forward over a whole prefix, each computed once."""

    def __init__(self) -> None:
        self._toy = ToyExecutor(**SIZES)
        self._storage = KVStorage(self._toy.planes, num_blocks=1, block_size=256)
        self._toy.bind(self._storage)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        if tokens not in self._known:
            span = RowSpan(tokens, 0, [0], len(tokens) - 1)
            batch = PackedBatch.build([span], block_size=256, scratch_block=1)
            self._known[tokens] = self._toy.forward(batch).logits.numpy()[0]
        return self._known[tokens]


TestDraftedSequences = DraftedSequences.TestCase
TestDraftedSequences.settings = settings(max_examples=25, stateful_step_count=25)
