"""The model drafter: what it drafts, what it computes for that, and what it survives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcache.manager import KVCacheManager
from model.kernels import get_kernels
from specdec.drafters.base import DraftRequest
from specdec.params import SamplingParams
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from tests.specdec.builders import NumpyKernels, Result, ToyExecutor, alone, prompts
from tests.specdec.draft_builders import (
    GREEDY,
    PARAMS,
    DraftBench,
    DraftToy,
    missing,
    started,
)

SAMPLED = SamplingParams(seed=2**63, max_tokens=40)
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "numpy": Sampler,
    "row operations": lambda: Sampler(NumpyKernels()),
    "compiled": lambda: Sampler(get_kernels()),
}


def facts(result: Result) -> tuple[object, ...]:
    return (result.token_ids, result.finish_reason, result.stop_token_id)


# -- a draft that equals the target ------------------------------------------------------------------------------------


@pytest.mark.case("V 8783")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("params", PARAMS)
def test_the_target_as_its_own_draft_is_always_accepted(params: SamplingParams, sampler: str) -> None:
    prompt = prompts(6)[5]
    for k, block_size in ((1, 4), (4, 1), (7, 16)):
        bench = DraftBench(k=k, block_size=block_size, sampler=SAMPLERS[sampler]())
        bench.add(prompt, params)
        bench.run()
        assert bench.num_accepted == bench.num_drafted > 0
        assert facts(bench.results[0]) == facts(alone(prompt, params, sampler=SAMPLERS[sampler]()))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_in_a_ragged_batch_too(k: int) -> None:
    bench = DraftBench(k=k)
    asked = list(zip(prompts(len(PARAMS)), PARAMS, strict=True))
    for prompt, params in asked:
        bench.add(prompt, params)
    bench.run()
    assert bench.num_accepted == bench.num_drafted > 0
    for seq_id, (prompt, params) in enumerate(asked):
        assert facts(bench.results[seq_id]) == facts(alone(prompt, params)), seq_id


def test_with_all_drafts_accepted_a_step_emits_k_plus_1_tokens() -> None:
    bench = DraftBench(k=4)
    seq_id = bench.add([1, 2, 3], GREEDY)
    bench.run_step()  # the prompt
    for _ in range(5):
        before = len(bench.sequences[seq_id].tokens)
        bench.run_step()
        assert len(bench.sequences[seq_id].tokens) == before + 5


@pytest.mark.parametrize("seed", [1, 2])
def test_another_model_changes_the_speed_only(seed: int) -> None:
    bench = DraftBench(DraftToy(seed=seed, layers=1), k=3)
    asked = list(zip(prompts(len(PARAMS)), PARAMS, strict=True))
    for prompt, params in asked:
        bench.add(prompt, params)
    bench.run()
    assert 0 < bench.num_accepted < bench.num_drafted
    for seq_id, (prompt, params) in enumerate(asked):
        assert facts(bench.results[seq_id]) == facts(alone(prompt, params)), seq_id


# -- what is computed --------------------------------------------------------------------------------------------------


def rows_of_next_step(bench: DraftBench) -> list[int]:
    before = len(bench.draft.forwards)
    bench.run_step()
    return bench.draft.forwards[before:]


def test_a_sequence_that_goes_on_lacks_what_full_acceptance_leaves_out() -> None:
    bench, seq_id = started(k=4)
    assert missing(bench, seq_id) == 1
    assert rows_of_next_step(bench) == [2, 1, 1, 1]


def test_a_rejected_draft_leaves_nothing_to_take_in() -> None:
    bench = DraftBench(DraftToy(seed=3), k=3)
    bench.add([5, 6, 7], GREEDY)
    bench.run_step()
    output = bench.steps[-1].outputs[0]
    assert output.num_accepted < output.num_drafted
    assert missing(bench, 0) == 0
    assert rows_of_next_step(bench) == [1, 1, 1]


def test_a_spell_without_drafts_costs_its_own_tokens_once() -> None:
    bench, seq_id = started(SAMPLED, k=3)
    for _ in range(6):
        bench.run_step(limits={seq_id: 0})
    assert missing(bench, seq_id) == 6 + 1
    assert rows_of_next_step(bench) == [6 + 2, 1, 1]
    assert bench.steps[-1].outputs[0].num_accepted == 3
    assert missing(bench, seq_id) == 1


def test_a_prefix_hit_brings_the_draft_models_kv_back() -> None:
    bench, first = started(prompt=22, k=3)
    bench.drop(first)
    prompt = [(7 * i) % 40 for i in range(22)]
    second = bench.add(prompt, SAMPLED)
    hits = bench.resume(second)
    assert hits == 20
    assert missing(bench, second) == 21 - hits, "of the prompt's cached part nothing is computed again"
    assert rows_of_next_step(bench) == [22 - hits, 1, 1]
    assert bench.steps[-1].outputs[0].num_accepted == 3


def test_after_a_preemption_only_what_the_cache_has_lost_is_computed_again() -> None:
    bench, seq_id = started(SAMPLED, k=3)
    other = bench.add([9] * 5, GREEDY)
    bench.run_step()
    bench.preempt(seq_id)
    bench.run_step(chunks={other: 1})
    hits = bench.resume(seq_id)
    known = len(bench.sequences[seq_id].tokens)
    assert hits == (known - 1) // 4 * 4
    left_out = 1  # by full acceptance, in the last cached block
    assert missing(bench, seq_id) == known - 1 - hits + left_out
    bench.drop(other)
    assert rows_of_next_step(bench) == [known - hits + left_out, 1, 1]
    assert bench.steps[-1].outputs[0].num_accepted == 3


def test_after_a_preemption_whose_blocks_went_to_others_the_rest_is_computed_again() -> None:
    bench, seq_id = started(SAMPLED, k=3, num_blocks=24)
    bench.preempt(seq_id)
    greedy = bench.add([3] * 60, GREEDY)
    for _ in range(6):
        bench.run_step(chunks={greedy: 60})
    bench.drop(greedy)
    known = len(bench.sequences[seq_id].tokens)
    hits = bench.resume(seq_id)
    assert 0 < hits < known - 12
    assert rows_of_next_step(bench) == [known - hits, 1, 1]
    assert bench.steps[-1].outputs[0].num_accepted == 3


def test_choices_that_share_a_prompt_take_it_in_once() -> None:
    bench = DraftBench(k=2, max_catch_up=8)
    prompt = [(5 * i) % 40 for i in range(17)]
    first = bench.add(prompt, SAMPLED)
    bench.run_step()
    others = [bench.add(prompt, replace(SAMPLED, seed=i)) for i in range(3)]
    assert [bench.resume(other) for other in others] == [16] * 3
    before = len(bench.draft.forwards)
    for _ in range(5):
        bench.run_step()
    assert missing(bench, first) <= 2
    known = sum(len(bench.sequences[s].tokens) for s in (first, *others))
    shared = 3 * 16
    twice = 4 * 5 * 2  # last tokens and lookahead
    assert bench.draft_rows(before) <= known - shared + twice
    assert bench.num_accepted == bench.num_drafted > 0


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_taken_in_little_by_little() -> None:
    bench = DraftBench(k=2, max_catch_up=10)
    short = bench.add([1, 2], GREEDY)
    bench.run_step()
    bench.run_step()
    long = bench.add([(3 * i) % 40 for i in range(64)], SAMPLED)
    bench.run_step()  # its prompt
    steps = 0
    while True:
        steps += 1
        rows = rows_of_next_step(bench)
        outputs = {output.seq_id: output for output in bench.steps[-1].outputs}
        assert rows[0] <= 10 + 2
        if outputs[long].num_drafted:
            break
        assert outputs[short].num_drafted == 2, "who has caught up drafts on"
    assert steps >= 64 // 10
    assert outputs[long].num_accepted == outputs[long].num_drafted == 2
    assert bench.num_accepted == bench.num_drafted


@pytest.mark.parametrize("max_rows", [1, 3, 7])
def test_no_forward_exceeds_its_rows(max_rows: int) -> None:
    bench = DraftBench(k=3, max_rows=max_rows)
    asked = list(zip(prompts(len(PARAMS)), PARAMS, strict=True))
    for prompt, params in asked:
        bench.add(prompt, params)
    bench.run()
    assert max(bench.draft.forwards) == max_rows
    assert bench.num_accepted == bench.num_drafted > 0


def test_nothing_is_written_beyond_the_table() -> None:
    bench, seq_id = started(k=2)
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens))
    room = sequence.table.num_slots - len(sequence.tokens)
    planes = [bench.storage.plane(plane.name) for plane in bench.draft.planes]
    outside = np.ones(len(planes[0]), dtype=bool)
    outside[[sequence.table.slot(p) for p in range(sequence.table.num_slots)]] = False
    before = [plane[torch.from_numpy(outside)].clone() for plane in planes]
    draft = bench.drafter.propose([DraftRequest(sequence, 50)])[0]
    assert len(draft) == room + 1  # the last token needs no slot
    for plane, was in zip(planes, before, strict=True):
        assert torch.equal(plane[torch.from_numpy(outside)], was)


def test_a_table_that_does_not_cover_the_tokens_gets_no_draft() -> None:
    bench, seq_id = started(k=2)
    sequence = bench.sequences[seq_id]
    del sequence.table.blocks[2:]
    assert bench.drafter.num_missing(sequence) is None
    assert bench.drafter.propose([DraftRequest(sequence, 3)]) == [[]]


def test_a_shorter_context_ends_the_drafts_not_the_sequence() -> None:
    bench = DraftBench(DraftToy(max_model_len=128), target=ToyExecutor(), k=4)
    bench.draft.info = replace(bench.draft.info, max_model_len=30)
    seq_id = bench.add([4] * 20, GREEDY)
    longest = 0
    while bench.sequences:
        known = len(bench.sequences[seq_id].tokens)
        bench.run_step()
        drafted = bench.steps[-1].outputs[0].num_drafted
        if drafted:
            longest = known + drafted
    assert longest == 31  # the last draft token stands behind the context and is not fed
    assert facts(bench.results[0]) == facts(alone([4] * 20, GREEDY))


# -- survival ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_after", [0, 1, 2])
def test_a_failure_in_the_middle_costs_one_steps_drafts(fail_after: int) -> None:
    bench, _ = started(SAMPLED, k=4)
    bench.add([1, 2, 3], PARAMS[2])
    bench.run_step()
    bench.draft.fail_after = fail_after
    bench.run_step()
    assert bench.steps[-1].stats.num_drafted == 0
    assert bench.step.num_drafter_failures == 1
    bench.draft.fail_after = None
    bench.run_step()
    assert bench.steps[-1].stats.num_drafted == 8
    bench.run()
    assert bench.num_accepted == bench.num_drafted


@pytest.mark.parametrize("fail_after", [0, 1, 2])
def test_a_failure_over_slots_that_were_valid_leaves_them_unknown(fail_after: int) -> None:
    bench, seq_id = started(k=4)
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 8)
    request = [DraftRequest(sequence, 6)]
    draft = bench.drafter.propose(request)[0]
    bench.draft.fail_after = fail_after
    with pytest.raises(RuntimeError):  # the same is being written again
        bench.drafter.propose(request)
    bench.draft.fail_after = None
    sequence.tokens.extend(draft[:3])  # all of it was right
    assert bench.drafter.propose([DraftRequest(sequence, 3)])[0] == draft[3:6]


@pytest.mark.parametrize("params", PARAMS)
def test_what_it_proposes_does_not_depend_on_what_it_proposed(params: SamplingParams) -> None:
    bench = DraftBench(DraftToy(seed=9), k=4)
    seq_id = bench.add([6, 7, 8, 9], replace(params, max_tokens=40, stop_token_ids=frozenset()))
    bench.run_step()
    for step in range(7):
        sequence = bench.sequences[seq_id]
        assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 4)
        if step % 3 == 1:
            bench.draft.fail_after = step % 2 + 1
            with pytest.raises(RuntimeError):
                bench.drafter.propose([DraftRequest(sequence, 4)])
            bench.draft.fail_after = None
            for _ in range(3):
                bench.run_step(limits={seq_id: 0})
            assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 4)
        stranger = Sequence(99, list(sequence.tokens), sequence.params, sequence.table)
        stranger.num_prompt_tokens = sequence.num_prompt_tokens
        fresh, known = (bench.drafter.propose([DraftRequest(one, 4)])[0] for one in (stranger, sequence))
        assert known == fresh
        bench.drafter.release(99)
        bench.run_step()
    assert bench.num_accepted < bench.num_drafted


def test_a_table_with_other_blocks_is_looked_at_anew() -> None:
    bench, seq_id = started(k=3)
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 4)
    request = [DraftRequest(sequence, 4)]
    draft = bench.drafter.propose(request)[0]
    blocks = sequence.table.blocks
    blocks[1] = 200  # nothing was ever written there
    assert missing(bench, seq_id) == len(sequence.tokens) - 1 - 4
    assert bench.drafter.propose(request)[0] == draft
    assert missing(bench, seq_id) == 0


def test_the_sequence_is_not_changed() -> None:
    bench, seq_id = started(PARAMS[3], prompt=9, steps=1, k=3)
    sequence = bench.sequences[seq_id]
    assert bench.manager.reserve(sequence.table, len(sequence.tokens) + 5)

    def look() -> list[object]:
        table = sequence.table
        return [
            sequence.num_computed,
            sequence.params,
            *map(copy.copy, (sequence.tokens, table.blocks, table.block_hashes)),
        ]

    before = look()
    bench.drafter.num_missing(sequence)
    assert bench.drafter.propose([DraftRequest(sequence, 5)])[0]
    bench.drafter.update(sequence, 1)
    assert look() == before


def test_a_seq_id_that_is_used_again_starts_anew() -> None:
    bench, first = started(PARAMS[2], k=3)
    bench.manager.free(bench.sequences.pop(first).table)  # nobody told the drafter
    table = bench.manager.new_table()
    assert bench.manager.reserve(table, 6)
    for tokens in ([8, 9, 10], [10, 9, 8, 7]):
        sequence = Sequence(first, tokens, PARAMS[2], table)
        fresh = Sequence(99, tokens, PARAMS[2], table)
        again, anew = (bench.drafter.propose([DraftRequest(one, 3)])[0] for one in (sequence, fresh))
        assert again == anew
        assert len(anew) == 3
        bench.drafter.release(99)


def test_a_private_table_works_like_any_other() -> None:
    bench = DraftBench(k=3)
    manager = KVCacheManager(200, 4, num_private_blocks=56)
    sequence = Sequence(0, [1, 2, 3, 4, 5], GREEDY, manager.new_private_table())
    assert manager.reserve(sequence.table, 9)
    assert len(bench.drafter.propose([DraftRequest(sequence, 4)])[0]) == 4


def test_tenants_do_not_meet_in_each_others_slots() -> None:
    bench, first = started(prompt=16, k=3)
    blocks = list(bench.sequences[first].table.blocks)
    bench.drop(first)
    table = bench.manager.new_table(b"another tenant")
    table.blocks = blocks
    sequence = Sequence(7, [(7 * i) % 40 for i in range(16)], GREEDY, table)
    assert bench.drafter.num_missing(sequence) == 15
    table.salt = b""
    assert bench.drafter.num_missing(Sequence(8, list(sequence.tokens), GREEDY, table)) == 0
