"""The model drafter's drafts: vocabularies of other widths, where drafts end, what they are expected to bring."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvcache.storage import KVStorage
from kvcache.table import BlockTable
from specdec.draft_length.cost import StepCost
from specdec.drafters.base import CostlyDrafter, DraftRequest
from specdec.drafters.model_drafter import ModelDrafter
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from tests.specdec.builders import ToyExecutor
from tests.specdec.draft_builders import (
    COST,
    GREEDY,
    PARAMS,
    DraftBench,
    DraftToy,
    fresh_logits,
    spoil_unknown,
    started,
)

SAMPLED = SamplingParams(seed=2**63, max_tokens=40)


# -- vocabularies ------------------------------------------------------------------------------------------------------


class _Cut(DraftToy):
    """The target's numbers for the lowest ids only: a vocabulary without padding, or with more of it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        if vocab_size < 40:
            self._head = self._head[:vocab_size]
        else:
            self._head = np.concatenate([self._head, 2 * self._head[: vocab_size - 40]])  # likelier than real tokens
        self.info = replace(self.info, vocab_size=vocab_size, embedding_rows=min(vocab_size, 40))


def low_ids(logits: np.ndarray, token_ids: list[int]) -> None:
    logits[30:40] = -np.inf


@pytest.mark.parametrize("params", PARAMS)
def test_vocabularies_may_be_padded_to_different_widths(params: SamplingParams) -> None:
    drafted = []
    for width in (40, 30, 33, 64):
        target = ToyExecutor()
        target.logit_hook = low_ids  # what is used of all
        bench = DraftBench(_Cut(width), target=target, k=4)
        bench.draft.logit_hook = low_ids
        bench.add([1, 2, 3, 29], params)
        bench.run()
        assert bench.num_accepted == bench.num_drafted > 0
        drafted.append(bench.num_drafted)
    assert len(set(drafted)) == 1, drafted


def test_an_id_that_the_draft_model_does_not_have_ends_its_drafts() -> None:
    bench = DraftBench(_Cut(30), k=4)
    foreign = bench.add([1, 2, 35, 3], GREEDY)
    bench.run_step()
    bench.run_step()
    assert bench.drafter.num_missing(bench.sequences[foreign]) is None
    assert bench.num_drafted == 0
    assert bench.draft.forwards == []
    assert bench.step.num_drafter_failures == 0


# -- ends and estimates ------------------------------------------------------------------------------------------------


def test_a_draft_ends_with_its_first_stop_token() -> None:
    bench, seq_id = started(k=0)
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 8)
    draft = bench.drafter.propose([DraftRequest(sequence, 8)])[0]
    assert len(draft) == 8
    sequence.params = replace(sequence.params, stop_token_ids=frozenset({draft[2]}))
    assert bench.drafter.propose([DraftRequest(sequence, 8)])[0] == draft[: draft.index(draft[2]) + 1]


def test_a_greedy_tokens_first_estimate_is_the_draft_models_probability() -> None:
    bench, seq_id = started(k=0)
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 3)
    scored = bench.drafter.propose_scored([DraftRequest(sequence, 3)])[0]
    chance = 1.0
    for i, (token, cumulative) in enumerate(zip(scored.token_ids, scored.cumulative, strict=True)):
        logits = fresh_logits(bench.draft, sequence.tokens + scored.token_ids[:i]).astype(np.float64)
        weights = np.exp(logits - logits.max())
        chance *= weights[token] / weights.sum()
        assert cumulative == pytest.approx(chance)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PARAMS[2]])
def test_estimates_follow_what_became_of_earlier_drafts(params: SamplingParams) -> None:
    right, wrong = DraftBench(k=3), DraftBench(DraftToy(seed=9), k=3)
    firsts = []
    for bench in (right, wrong):
        for i in range(4):
            bench.add([i, i + 1, i + 2], replace(params, seed=i))
        bench.run()
        seq_id = bench.add([3, 3, 3], params)
        bench.run_step()
        sequence = bench.sequences[seq_id]
        assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 3)
        firsts.append(bench.drafter.propose_scored([DraftRequest(sequence, 3)])[0].cumulative[0])
    assert firsts[0] > 0.75 > 0.6 > firsts[1]


def test_a_draft_ends_where_too_little_is_left_of_its_chance() -> None:
    made, seq_id = started(k=0)
    sequence = made.sequences[seq_id]
    assert made.manager.reserve(sequence.table, len(sequence.tokens) + 8)
    whole = made.drafter.propose_scored([DraftRequest(sequence, 8)])[0]
    bench = DraftBench(k=0, least_survival=whole.cumulative[3] * 1.001)
    own = bench.sequences[bench.add(sequence.tokens, GREEDY)]
    assert bench.manager.reserve(own.table, len(own.tokens) + 8)
    assert bench.drafter.propose([DraftRequest(own, 8)])[0] == whole.token_ids[:4]


def test_it_says_what_its_rounds_cost() -> None:
    bench = DraftBench(k=2)
    assert isinstance(bench.drafter, CostlyDrafter)
    assert bench.drafter.round_seconds(64) == COST.seconds(64)
    draft = DraftToy()
    storage = KVStorage(draft.planes, num_blocks=8, block_size=4)
    draft.bind(storage)
    measured = ModelDrafter(draft, storage, Sampler(), vocab_size=40, max_rows=8)
    assert 0 < measured.round_seconds(1) <= measured.round_seconds(8)
    slow = ModelDrafter(draft, storage, Sampler(), vocab_size=40, max_rows=8, cost=StepCost([(1, 1e-9), (8, 2e-9)]))
    before = slow.round_seconds(1)
    table = BlockTable(4)
    table.blocks = [0, 1]
    slow.propose([DraftRequest(Sequence(0, [1, 2, 3], GREEDY, table), 3)])
    assert slow.round_seconds(1) > before, "a round took longer than was said"


@pytest.mark.parametrize("sizes", [{"vocab_size": 0}, {"max_rows": 0}, {"max_catch_up": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    draft = DraftToy()
    storage = KVStorage(draft.planes, num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match="must be positive"):
        ModelDrafter(draft, storage, Sampler(), cost=COST, **{"vocab_size": 40, "max_rows": 8, **sizes})


def test_unknown_slots_are_never_read() -> None:
    bench = DraftBench(DraftToy(seed=4), k=5, num_blocks=90)
    for i, params in enumerate(PARAMS):
        bench.add([i] * (3 * i + 1), params)
    while bench.sequences:
        spoil_unknown(bench)
        bench.run_step()
        if len(bench.steps) == 4:
            victim = next(iter(bench.sequences))
            bench.preempt(victim)
            bench.resume(victim)
    assert bench.step.num_drafter_failures == 0
    assert all(0 <= token < 40 for result in bench.results.values() for token in result.token_ids)
