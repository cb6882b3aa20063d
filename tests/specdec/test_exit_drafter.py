"""The exit drafter: the target's first layers draft on its own KV planes, and change no bit of what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.errors import ModelError
from model.interface import Executor
from specdec.draft_length.cost import StepCost
from specdec.drafters.base import CostlyDrafter, DraftRequest
from specdec.drafters.exit_drafter import ExitDrafter, frequent_ids
from specdec.drafters.scored import ScoringDrafter
from specdec.ledger_hook import WritesTarget
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from tests.model.families import build_executor
from tests.model.kernel_builders import fused_executor, tiny_model
from tests.specdec.builders import Bench, NumpyKernels, ToyExecutor, alone, prompts
from tests.specdec.draft_builders import PARAMS
from tests.specdec.exit_builders import GREEDY, ExitBench, ExitToy, assert_kv_of_plain_decoding, known_cost
from tests.specdec.table_model import TableExecutor

# -- all layers and the whole head: the target itself ---------------------------------------------------------------


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_all_layers_are_always_right_alone_and_in_a_ragged_batch(params: SamplingParams, kernels: bool) -> None:
    expected = [alone(prompt, params, executor=ToyExecutor(layers=3)) for prompt in prompts()]
    sampler = Sampler(NumpyKernels()) if kernels else None
    together = ExitBench(num_layers=3, sampler=sampler)
    for prompt in prompts():
        together.add(prompt, params)
    together.run()
    assert together.num_accepted == together.num_drafted > 0
    assert [together.results[i].token_ids for i in range(4)] == [one.token_ids for one in expected]
    for prompt, answer in zip(prompts(), expected, strict=True):
        single = ExitBench(num_layers=3, sampler=sampler)
        single.add(prompt, params)
        assert single.run()[0].token_ids == answer.token_ids
        assert single.num_accepted == single.num_drafted


TINY: dict[str, Callable[[], Executor]] = {
    "kernels bf16": lambda: fused_executor(tiny_model("llama", torch.bfloat16), kernels=True),
    "kernels fp32": lambda: fused_executor(tiny_model("qwen2-some-sliding"), kernels=True),
    "torch bf16": lambda: fused_executor(tiny_model("llama", torch.bfloat16), kernels=False),
    "generic bf16": lambda: build_executor("llama", "bfloat16"),
    "generic fp32": lambda: build_executor("gpt2"),
}


@pytest.fixture(params=TINY)
def tiny(request: pytest.FixtureRequest) -> Iterator[Executor]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield TINY[request.param]()
    torch.set_num_threads(before)


def test_real_layers_draft_what_the_model_says_and_write_what_it_writes(tiny: Executor) -> None:
    asked = list(zip(prompts(vocab=90), [GREEDY, replace(GREEDY, temperature=1.0, seed=3)] * 2, strict=True))
    plain = Bench(tiny)
    for prompt, params in asked:
        plain.add(prompt, replace(params, max_tokens=99))
    for _ in range(GREEDY.max_tokens + 2):
        plain.run_step()
    expected = {seq_id: result.token_ids for seq_id, result in plain.results.items()}
    for depth, reduced in ((tiny.info.num_layers, None), (1, None), (1, 40)):
        bench = ExitBench(tiny, num_layers=depth, reduced=reduced)
        for prompt, params in asked:
            bench.add(prompt, params)
        while bench.sequences:
            assert_kv_of_plain_decoding(bench, plain)
            bench.run_step()
        for seq_id, result in bench.results.items():
            assert result.token_ids == expected[seq_id][: len(result.token_ids)]
            assert len(result.token_ids) == GREEDY.max_tokens
        assert bench.num_drafted > 0
        if depth == tiny.info.num_layers:
            assert bench.num_accepted == bench.num_drafted


# -- fewer layers ---------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    num_layers=st.integers(1, 3),
    reduced=st.sampled_from([None, 1, 17, 39, 500]),
    k=st.integers(1, 6),
    block_size=st.sampled_from([1, 2, 4, 16]),
    params=st.lists(st.sampled_from(PARAMS), min_size=1, max_size=4),
    least_survival=st.sampled_from([0.0, 0.3]),
    chaos=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["preempt", "fail", "k"])), max_size=6),
)
def test_depth_vocabulary_and_disturbances_change_no_token(
    num_layers: int,
    reduced: int | None,
    k: int,
    block_size: int,
    params: list[SamplingParams],
    least_survival: float,
    chaos: list[tuple[int, str]],
) -> None:
    toy = ExitToy()
    bench = ExitBench(
        toy,
        num_layers=num_layers,
        reduced=reduced,
        k=k,
        block_size=block_size,
        least_survival=least_survival,
        poison=True,
    )
    for prompt, own in zip(prompts(len(params), seed=k), params, strict=True):
        bench.add(prompt, own)
    for who, what in chaos:
        if what == "preempt" and who in bench.sequences:
            bench.preempt(who)
        toy.fails = what == "fail"
        if bench.sequences:
            bench.run_step(limits={who: 1} if what == "k" else None)
    toy.fails = False
    bench.run()
    for seq_id, (prompt, own) in enumerate(zip(prompts(len(params), seed=k), params, strict=True)):
        assert bench.results[seq_id].token_ids == alone(prompt, own, executor=ToyExecutor(layers=3)).token_ids
        assert bench.results[seq_id].error is None
    assert bench.ledger.draft_rows_checked == sum(toy.exits)
    assert bench.manager.stats().used_blocks == 0


def test_the_planes_hold_after_each_step_what_plain_decoding_leaves() -> None:
    plain = Bench(ToyExecutor(layers=3))
    bench = ExitBench(num_layers=2)
    for prompt in prompts():
        plain.add(prompt, replace(GREEDY, max_tokens=40))
        bench.add(prompt, GREEDY)
    for _ in range(30):
        plain.run_step()
    while bench.sequences:
        bench.run_step()
        assert_kv_of_plain_decoding(bench, plain)
    assert 0 < bench.num_accepted < bench.num_drafted


def test_greedy_drafts_are_the_best_ids_of_the_first_layers() -> None:
    toy = ExitToy()
    for reduced in (None, 11):
        bench = ExitBench(toy, num_layers=2, reduced=reduced)
        bench.decoding()
        drafts = bench.ask()
        for sequence, draft in zip(bench.sequences.values(), drafts, strict=True):
            assert len(draft) == 4
            for i, token in enumerate(draft):
                tokens = [*sequence.tokens, *draft[:i]]
                assert token == int(exit_logits(toy, tokens, 2)[: reduced or None].argmax())
        toy.bind(bench.storage)


def exit_logits(toy: ExitToy, tokens: Seq[int], depth: int) -> np.ndarray:
    """What follows ``tokens`` by the first ``depth`` layers, from one forward over all of them."""
    twin = ExitToy.__new__(ExitToy)
    twin.__dict__.update(toy.__dict__, exits=[], fails=False)
    bench = Bench(twin)
    table = bench.manager.new_table()
    assert bench.manager.reserve(table, len(tokens))
    span = RowSpan(list(tokens), 0, table.blocks, len(tokens) - 1)
    batch = PackedBatch.build([span], block_size=4, scratch_block=bench.storage.scratch_block)
    logits: np.ndarray = twin.forward(batch, num_layers=depth).logits.numpy()[0]
    return logits


def test_a_round_has_one_row_for_each_sequence_that_drafts_on() -> None:
    toy = ExitToy()
    bench = ExitBench(toy)
    bench.decoding()
    bench.run_step(limits={0: 1, 1: 3, 2: 4})
    assert toy.exits == [3, 2, 2, 1]


def test_a_draft_leaves_the_sequence_and_its_table_alone() -> None:
    bench = ExitBench()
    for params in PARAMS[:4]:
        bench.add(prompts()[3], params)
    bench.run_step()
    before = [(list(s.tokens), s.num_computed, s.num_prompt_tokens) for s in bench.sequences.values()]
    first = bench.ask()
    tables = [list(s.table.blocks) for s in bench.sequences.values()]
    assert bench.ask() == first
    assert [(list(s.tokens), s.num_computed, s.num_prompt_tokens) for s in bench.sequences.values()] == before
    assert [list(s.table.blocks) for s in bench.sequences.values()] == tables


def test_a_draft_stays_within_the_table() -> None:
    bench = ExitBench(block_size=2)
    bench.decoding(count=2)
    for sequence in bench.sequences.values():
        assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 2)
    room = [sequence.table.num_slots - len(sequence.tokens) for sequence in bench.sequences.values()]
    requests = [DraftRequest(sequence, 6) for sequence in bench.sequences.values()]
    assert set(room) == {2, 3}
    assert [len(draft) for draft in bench.drafter.propose(requests)] == room


def test_a_sequence_that_is_not_decoding_gets_no_draft() -> None:
    toy = ExitToy()
    bench = ExitBench(toy)
    for prompt in prompts():
        bench.add(prompt, GREEDY)
    assert [bench.drafter.num_missing(sequence) for sequence in bench.sequences.values()] == [0, None, None, None]
    bench.run_step()
    assert toy.exits == [1] * 4  # the prompt of one token
    assert [bench.drafter.num_missing(sequence) for sequence in bench.sequences.values()] == [0] * 4


def test_a_draft_ends_with_its_first_stop_token() -> None:
    bench = ExitBench()
    bench.decoding()
    drafts = bench.ask()
    stops = frozenset(draft[1] for draft in drafts)
    for sequence in bench.sequences.values():
        sequence.params = replace(sequence.params, stop_token_ids=stops)
    for draft, cut in zip(drafts, bench.ask(), strict=True):
        end = next(i for i, token in enumerate(draft) if token in stops)
        assert cut == draft[: end + 1]


# -- estimates ------------------------------------------------------------------------------------------------------


def test_estimates_never_rise_and_belong_to_their_tokens() -> None:
    bench = ExitBench()
    for params in PARAMS:
        bench.add(prompts()[3], params)
    bench.run_step()
    for sequence in bench.sequences.values():
        assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 4)
    found = bench.drafter.propose_scored([DraftRequest(sequence, 4) for sequence in bench.sequences.values()])
    assert any(len(draft.token_ids) > 1 for draft in found)
    for draft in found:
        assert len(draft.cumulative) == len(draft.token_ids)
        assert sorted(draft.cumulative, reverse=True) == draft.cumulative
        assert all(0 < chance <= 1 for chance in draft.cumulative)


def test_a_draft_ends_where_too_little_is_left() -> None:
    whole, cut = (ExitBench(num_layers=2, least_survival=least) for least in (0.0, 0.4))
    for bench in (whole, cut):
        bench.decoding()
    lengths = []
    for sequence in whole.sequences.values():
        assert whole.manager.reserve(sequence.table, len(sequence.tokens) + 4)
    scored = whole.drafter.propose_scored([DraftRequest(sequence, 4) for sequence in whole.sequences.values()])
    for draft, kept in zip(scored, cut.ask(), strict=True):
        end = next((i + 1 for i, chance in enumerate(draft.cumulative) if chance < 0.4), 4)
        assert kept == draft.token_ids[:end]
        lengths.append(end)
    assert min(lengths) < 4


def test_estimates_of_a_drafter_that_is_right_more_often_than_it_says_rise() -> None:
    bench = ExitBench(ExitToy(layers=2), num_layers=2)
    bench.decoding(replace(GREEDY, max_tokens=40))
    for _ in range(6):
        bench.run_step()
    fresh = ExitDrafter(
        bench.executor, bench.storage, Sampler(), num_layers=2, reduced=None, least_survival=0.0, measure=known_cost
    )
    bench.ask(1)
    requests = [DraftRequest(sequence, 1) for sequence in bench.sequences.values()]
    pairs = zip(bench.drafter.propose_scored(requests), fresh.propose_scored(requests), strict=True)
    compared = [(ours, theirs) for ours, theirs in pairs if theirs.cumulative[0] < 0.9]
    assert compared
    for ours, theirs in compared:
        assert ours.token_ids == theirs.token_ids
        assert ours.cumulative[0] > theirs.cumulative[0]


# -- the reduced vocabulary -----------------------------------------------------------------------------------------


def test_the_reduced_vocabulary_has_the_lowest_ids_and_the_stop_ids() -> None:
    assert frequent_ids(4, 100, (99, 2, 300)) == [0, 1, 2, 3, 99]
    assert frequent_ids(100, 100, ()) is None
    assert frequent_ids(99, 100, (99,)) is None
    assert ExitBench(reduced=10).drafter.num_ids == 10
    assert ExitBench(reduced=40).drafter.num_ids == ExitBench().drafter.num_ids == 40


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_no_id_outside_of_the_reduced_vocabulary_is_drafted(params: SamplingParams) -> None:
    bench = ExitBench(reduced=7, sampler=Sampler(NumpyKernels()))
    for prompt in prompts():
        bench.add(prompt, params)
    bench.run_step()
    drafts = bench.ask()
    assert any(drafts)
    assert all(token < 7 for draft in drafts for token in draft)


def test_a_sequence_that_no_reduced_id_is_allowed_for_gets_no_draft_and_goes_on() -> None:
    params = replace(GREEDY, allowed_token_ids=(20, 21, 22))
    bench = ExitBench(reduced=7)
    bench.add(prompts()[2], params)
    bench.add(prompts()[2], GREEDY)
    bench.run()
    assert bench.results[0].token_ids == alone(prompts()[2], params, executor=ToyExecutor(layers=3)).token_ids
    assert bench.step.num_drafter_failures == 0
    assert bench.num_drafted > 0


# -- failures -------------------------------------------------------------------------------------------------------


def test_a_forward_that_fails_costs_its_drafts_alone() -> None:
    toy = ExitToy()
    bench = ExitBench(toy)
    for params in PARAMS:
        bench.add(prompts()[3], params)
    bench.run_step()
    toy.fails = True
    assert bench.run_step().stats.num_drafted == 0
    assert bench.step.num_drafter_failures == 1
    toy.fails = False
    bench.run()
    for seq_id, params in enumerate(PARAMS):
        assert bench.results[seq_id].token_ids == alone(prompts()[3], params, executor=ToyExecutor(layers=3)).token_ids


def test_a_draft_that_was_left_in_the_middle_leaves_nothing_behind() -> None:
    toy = ExitToy()
    bench = ExitBench(toy)
    bench.decoding(replace(PARAMS[2], max_tokens=30))  # penalties: what was drafted would count
    toy.fails_after = 2
    assert bench.run_step().stats.num_drafted == 0
    fresh = ExitDrafter(
        toy, bench.storage, Sampler(), num_layers=1, reduced=None, least_survival=0.0, measure=known_cost
    )
    drafts = bench.ask()
    assert drafts == fresh.propose([DraftRequest(sequence, 4) for sequence in bench.sequences.values()])


def test_what_the_target_cannot_do_is_refused() -> None:
    sampler = Sampler()
    table = TableExecutor(8)
    storage = Bench(table).storage
    with pytest.raises(ModelError, match="generic/table cannot stop"):
        ExitDrafter(table, storage, sampler, num_layers=1, measure=known_cost)
    toy = ExitToy()
    storage = Bench(toy).storage
    for depth in (0, 4):
        with pytest.raises(ModelError, match=f"after {depth} layers"):
            ExitDrafter(toy, storage, sampler, num_layers=depth, measure=known_cost)
    with pytest.raises(ValueError, match="at least one id"):
        ExitDrafter(toy, storage, sampler, num_layers=1, reduced=0, measure=known_cost)


def test_it_is_a_costly_scoring_drafter_that_measures_what_it_costs() -> None:
    toy = ExitToy()
    drafter = ExitDrafter(toy, Bench(toy).storage, Sampler(), num_layers=1)
    assert isinstance(drafter, CostlyDrafter)
    assert isinstance(drafter, ScoringDrafter)
    assert isinstance(drafter, WritesTarget)
    assert sum(toy.exits) > 0
    assert 0 < drafter.round_seconds(1) <= drafter.round_seconds(64)


def test_who_measures_is_told_where_the_layers_end() -> None:
    toy = ExitToy()
    kinds = []

    def measure(executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
        kinds.append(executor.kind)
        return known_cost(executor, storage, max_rows)

    for depth, reduced in ((1, None), (2, None), (2, 8), (2, 9)):
        drafter = ExitDrafter(toy, Bench(toy).storage, Sampler(), num_layers=depth, reduced=reduced, measure=measure)
        assert drafter.round_seconds(1) == 1e-3
    assert len(set(kinds)) == 4
    assert toy.kind not in kinds
