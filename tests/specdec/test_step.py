"""The speculative step: what it emits, what it leaves behind, and what it does when something fails."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from specdec.drafters.base import DraftRequest
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from specdec.params import SamplingParams
from specdec.plan import StepPlan
from specdec.sampling import RowJob, Sampler
from specdec.sequence import Sequence
from tests.specdec.builders import VOCAB, Bench, NumpyKernels, ScriptedDrafter, ToyExecutor, alone, outputs, prompts
from tests.specdec.verification_cases import CASES, Case

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=24)
PROMPT = [5, 6, 7]


def scripted_target(target: Seq[int], prompt: Seq[int] = PROMPT) -> ToyExecutor:
    """A model whose greedy token at output index i is ``target[i]``."""
    executor = ToyExecutor()

    def hook(logits: np.ndarray, token_ids: list[int]) -> None:
        index = len(token_ids) - len(prompt)
        if 0 <= index < len(target):
            logits[target[index]] = 1000.0

    executor.logit_hook = hook
    return executor


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kernels", [None, NumpyKernels()], ids=["numpy", "kernels"])
def test_a_step_emits_the_verdict_and_rolls_back_the_rest(case: Case, kernels: NumpyKernels | None) -> None:
    drafts_left = [list(case.drafts)]
    drafter = ScriptedDrafter(lambda sequence, limit: drafts_left.pop()[:limit] if drafts_left else [])
    bench = Bench(
        scripted_target(case.target), drafter=drafter, k=len(case.drafts), block_size=2, sampler=Sampler(kernels)
    )
    params = replace(GREEDY, max_tokens=case.tokens_left, stop_token_ids=case.stops, logprobs=1)
    seq_id = bench.add(PROMPT, params)
    sequence = bench.sequences[seq_id]
    result = bench.run_step()
    (output,) = result.outputs
    offered = len(case.drafts) if case.tokens_left > len(case.drafts) else max(0, case.tokens_left - 1)
    assert output.token_ids == case.emitted
    assert output.num_drafted == offered
    assert output.num_accepted == min(case.accepted, offered)
    assert output.finish_reason == case.finish_reason
    assert output.stop_token_id == case.stop_token_id
    assert [entry.token_id for entry in output.logprobs or ()] == list(case.emitted)
    assert sequence.tokens == PROMPT + list(case.emitted)
    assert sequence.num_computed == len(sequence.tokens) - 1
    assert result.stats.rollback_tokens == offered - output.num_accepted
    assert result.stats.num_emitted == len(case.emitted)
    assert result.stats.alignment_bytes_moved == result.stats.blocks_moved == 0
    assert drafter.heard == ([(seq_id, case.emitted)] if case.emitted else [])


def test_whole_surplus_blocks_go_back_and_the_next_tokens_slot_stays() -> None:
    wrong = ScriptedDrafter(lambda sequence, limit: [0] * limit)
    bench = Bench(scripted_target([1] * 30), drafter=wrong, k=8, block_size=2)
    bench.add([1, 2, 3, 4], replace(GREEDY, max_tokens=20))
    sequence = bench.sequences[0]
    result = bench.run_step()
    # 4 tokens and 8 drafts need 6 blocks; 5 tokens remain, and the fifth has no KV yet.
    assert len(sequence.table.blocks) == 3
    assert result.outputs[0].blocks_trimmed == result.stats.blocks_trimmed == 3
    assert result.stats.rollback_tokens == 8


@pytest.mark.case("V 18668")
def test_rejected_tokens_never_enter_the_prefix_cache() -> None:
    wrong = ScriptedDrafter(lambda sequence, limit: [0] * limit)
    bench = Bench(scripted_target([1] * 30), drafter=wrong, k=8, block_size=2)
    bench.add(PROMPT, replace(GREEDY, max_tokens=20))
    for _ in range(4):
        bench.run_step()
    written = bench.sequences[0].tokens
    table = bench.manager.new_table()
    assert bench.manager.match_prefix(table, PROMPT + [0] * 8, 11) == 2
    bench.manager.free(table)
    assert bench.manager.match_prefix(table, written, len(written)) == (len(written) - 1) // 2 * 2


def test_a_chunk_that_does_not_reach_the_last_token_only_advances() -> None:
    bench = Bench(block_size=4, drafter=ScriptedDrafter(lambda sequence, limit: [1] * limit), k=3)
    bench.add(list(range(10)), replace(GREEDY, max_tokens=3))
    sequence = bench.sequences[0]
    for done in (4, 8):
        (output,) = bench.run_step({0: 4}).outputs
        assert output.token_ids == ()
        assert output.num_drafted == 0
        assert sequence.num_computed == done == sequence.table.num_committed_tokens
        assert sequence.tokens == list(range(10))
    (output,) = bench.run_step({0: 4}).outputs
    assert len(output.token_ids) >= 1
    assert [output.token_ids for step in bench.steps[:2] for output in step.outputs] == [(), ()]


def test_max_tokens_0_scores_the_prompt_and_ends() -> None:
    params = replace(GREEDY, max_tokens=0, prompt_logprobs=2)
    bench = Bench(drafter=ScriptedDrafter(lambda sequence, limit: [1] * limit), k=3)
    bench.add(list(range(9)), params)
    bench.run_step({0: 5})
    (output,) = bench.run_step().outputs
    assert output.token_ids == ()
    assert output.finish_reason == "length"
    assert output.num_drafted == 0
    assert sorted(bench.results[0].prompt_logprobs) == list(range(1, 9))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
def test_prompt_logprobs_are_the_same_bits_for_every_chunking(chunk: int) -> None:
    prompt = list(range(17))
    params = replace(GREEDY, prompt_logprobs=3, logprobs=2, max_tokens=3)
    whole = outputs([prompt], params)[0]
    assert sorted(whole.prompt_logprobs) == list(range(1, 17))
    assert [whole.prompt_logprobs[i].token_id for i in range(1, 17)] == prompt[1:]
    bench = Bench(block_size=4)
    bench.add(prompt, params)
    bench.add(prompt[:5], GREEDY)
    while bench.sequences:
        bench.run_step(dict.fromkeys(bench.sequences, chunk))
    assert bench.results[0].prompt_logprobs == whole.prompt_logprobs
    assert bench.results[0].logprobs == whole.logprobs


def test_recomputing_after_preemption_scores_prompt_tokens_only_and_alike() -> None:
    params = replace(GREEDY, prompt_logprobs=1)
    bench = Bench()
    bench.add(PROMPT, params)
    bench.run_step()
    bench.run_step()
    first = dict(bench.results[0].prompt_logprobs)
    bench.preempt(0)
    bench.results[0].prompt_logprobs.clear()
    bench.run()
    assert bench.results[0].prompt_logprobs == first
    assert sorted(first) == [1, 2]


def test_a_prompt_token_is_scored_like_the_same_token_generated() -> None:
    params = replace(GREEDY, logprobs=3, max_tokens=6)
    written = outputs([PROMPT], params)[0]
    scored = outputs([PROMPT + written.token_ids], replace(params, max_tokens=0, prompt_logprobs=3))[0]
    assert [scored.prompt_logprobs[len(PROMPT) + i] for i in range(6)] == written.logprobs


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kernels", [None, NumpyKernels()], ids=["numpy", "kernels"])
def test_a_sequence_that_cannot_be_sampled_fails_alone(greedy: bool, kernels: NumpyKernels | None) -> None:
    executor = ToyExecutor()

    def hook(logits: np.ndarray, token_ids: list[int]) -> None:
        if token_ids[0] == 33 and len(token_ids) == 6:
            logits[2] = math.nan

    executor.logit_hook = hook
    params = replace(GREEDY, temperature=0.0 if greedy else 1.0)
    drafter = ScriptedDrafter(lambda sequence, limit: [1] * limit)
    bench = Bench(executor, drafter=drafter, k=2, sampler=Sampler(kernels))
    for prompt in ([1, 2], [33, 1, 2], [7, 7, 7, 7]):
        bench.add(prompt, params)
    before: list[int] = []
    state = bench.sequences[1]
    while 1 in bench.sequences:
        before, computed = list(state.tokens), state.num_computed
        bench.run_step()
    assert "nan" in (bench.results[1].error or "")
    assert (state.tokens, state.num_computed) == (before, computed)
    bench.run()
    for seq_id, prompt in ((0, [1, 2]), (2, [7, 7, 7, 7])):
        assert bench.results[seq_id].token_ids == alone(prompt, params).token_ids


@pytest.mark.parametrize("kernels", [None, NumpyKernels()], ids=["numpy", "kernels"])
def test_nan_in_a_row_behind_a_rejection_is_not_an_error(kernels: NumpyKernels | None) -> None:
    executor = ToyExecutor()

    def hook(logits: np.ndarray, token_ids: list[int]) -> None:
        if 39 in token_ids:
            logits[:] = math.nan

    executor.logit_hook = hook
    drafter = ScriptedDrafter(lambda sequence, limit: [39] * limit)  # the model never says 39 here
    found = outputs([PROMPT], GREEDY, executor=executor, drafter=drafter, k=4, sampler=Sampler(kernels))[0]
    assert found.error is None
    assert found.token_ids == alone(PROMPT, GREEDY).token_ids
    assert 39 not in found.token_ids


def test_no_token_left_fails_the_request_in_words_and_no_other() -> None:
    impossible = replace(GREEDY, allowed_token_ids=(3,), min_tokens=4, stop_token_ids=frozenset({3}))
    outside = replace(GREEDY, logit_bias=((VOCAB, 1.0),))
    found = outputs([PROMPT, PROMPT, PROMPT], [impossible, GREEDY, outside])
    assert "allowed_token_ids" in (found[0].error or "")
    assert "min_tokens" in (found[0].error or "")
    assert str(VOCAB) in (found[2].error or "")
    assert found[1].token_ids == alone(PROMPT, GREEDY).token_ids


def test_an_executor_that_raises_leaves_every_sequence_as_it_was() -> None:
    executor = ToyExecutor()
    bench = Bench(executor, drafter=ScriptedDrafter(lambda sequence, limit: [1] * limit), k=2)
    bench.add(PROMPT, replace(GREEDY, frequency_penalty=1.0))
    bench.run_step()
    sequence = bench.sequences[0]
    before = (list(sequence.tokens), sequence.num_computed)

    def fail(logits: np.ndarray, token_ids: list[int]) -> None:
        raise RuntimeError("device lost")

    executor.logit_hook = fail
    with pytest.raises(RuntimeError, match="device lost"):
        bench.run_step()
    assert (sequence.tokens, sequence.num_computed) == before
    executor.logit_hook = None
    bench.run()
    assert bench.results[0].token_ids == alone(PROMPT, replace(GREEDY, frequency_penalty=1.0)).token_ids


class BrokenSampler(Sampler):
    """Raises for batches of more than ``most`` sequences, and for those with the seed ``victim``."""

    def __init__(self, most: int, victim: int | None = None) -> None:
        super().__init__(NumpyKernels())
        self.most, self.victim = most, victim

    def sample_batch(self, logits: Tensor, jobs: Seq[RowJob]) -> dict[int, int]:
        if len(jobs) > self.most or any(job.params.seed == self.victim for job in jobs):
            raise RuntimeError("no sampling today")
        return super().sample_batch(logits, jobs)


PLAIN_PARAMS = [
    SamplingParams(seed=seed, temperature=temperature, max_tokens=6, logprobs=1)
    for seed, temperature in ((1, 0.0), (2, 1.0), (3, 0.7))
]


def test_sampling_that_fails_for_many_at_once_gives_the_same_tokens_one_by_one() -> None:
    found = []
    for sampler in (Sampler(NumpyKernels()), BrokenSampler(most=1)):
        bench = Bench(drafter=ScriptedDrafter(lambda sequence, limit: [1] * limit), k=2, sampler=sampler)
        for params in PLAIN_PARAMS:
            bench.add(PROMPT, params)
        bench.run()
        found.append([(result.token_ids, result.logprobs) for result in bench.results.values()])
    assert found[0] == found[1]


def test_who_cannot_be_sampled_fails_alone() -> None:
    bench = Bench(sampler=BrokenSampler(most=9, victim=2))
    for params in PLAIN_PARAMS:
        bench.add(PROMPT, params)
    victim = bench.sequences[1]
    first, failed, last = bench.run_step().outputs
    assert failed.error == "internal error while sampling (RuntimeError)"
    assert failed.error_type == "server"
    assert victim.tokens == PROMPT
    assert [output.token_ids for output in (first, last)] == [
        tuple(alone(PROMPT, params).token_ids[:1]) for params in (PLAIN_PARAMS[0], PLAIN_PARAMS[2])
    ]


def test_its_own_check_runs_a_forward_and_changes_nothing() -> None:
    executor = ToyExecutor()
    bench = Bench(executor)
    bench.add(PROMPT, GREEDY)
    bench.run_step()
    bench.step.check()
    bench.run()
    assert bench.results[0].token_ids == alone(PROMPT, GREEDY).token_ids

    def fail(logits: np.ndarray, token_ids: list[int]) -> None:
        raise RuntimeError("device lost")

    executor.logit_hook = fail
    with pytest.raises(RuntimeError, match="device lost"):
        bench.step.check()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_step_that_raises_tells_whether_it_changed_anything(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ToyExecutor()
    bench = Bench(executor)
    bench.add(PROMPT, GREEDY)

    def fail(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(*((bench.manager, "commit", fail) if late else (executor, "logit_hook", fail)))
    with pytest.raises(RuntimeError, match="planted"):
        bench.run_step()
    assert bench.step.intact == (not late)
    monkeypatch.undo()


class BrokenDrafter(ScriptedDrafter):
    def __init__(self, how: str) -> None:
        super().__init__(lambda sequence, limit: [], "broken")
        self.how = how

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        if self.how == "raises":
            raise RuntimeError("no drafts today")
        if self.how == "too few answers":
            return []
        if self.how == "not ids":
            return [["x"] for _ in requests]  # type: ignore[list-item]
        return [[1] * (request.max_drafts + 5) for request in requests]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        raise RuntimeError("no update either")

    def release(self, seq_id: int) -> None:
        raise RuntimeError("nor release")


@pytest.mark.parametrize("how", ["raises", "too few answers", "not ids", "too many drafts"])
def test_a_broken_drafter_costs_drafts_and_not_the_request(how: str, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(drafter=BrokenDrafter(how), k=3)
    bench.add(PROMPT, GREEDY)
    with caplog.at_level(logging.WARNING):
        found = bench.run()[0]
    assert found.error is None
    assert found.token_ids == alone(PROMPT, GREEDY).token_ids
    assert bench.step.num_drafter_failures > 0
    assert "broken" in caplog.text
    assert all(output.num_drafted <= 3 for step in bench.steps for output in step.outputs)


@pytest.mark.parametrize("bad", [VOCAB, -1, 10**9])
def test_drafts_are_cut_before_the_first_id_outside_of_the_vocabulary(bad: int) -> None:
    drafter = ScriptedDrafter(lambda sequence, limit: [1, bad, 2][:limit])
    bench = Bench(drafter=drafter, k=3)
    bench.add(PROMPT, GREEDY)
    assert bench.run_step().outputs[0].num_drafted == 1
    assert bench.run()[0].token_ids == alone(PROMPT, GREEDY).token_ids


def test_ids_beyond_the_embedding_are_never_emitted() -> None:
    executor = ToyExecutor(embedding_rows=30)

    def hook(logits: np.ndarray, token_ids: list[int]) -> None:
        logits[35] = 50.0

    executor.logit_hook = hook
    for params in (GREEDY, replace(GREEDY, temperature=1.0, logprobs=5)):
        found = outputs([PROMPT], params, executor=executor, sampler=Sampler(NumpyKernels()))[0]
        assert found.error is None
        assert max(found.token_ids) < 30
        assert all(token < 30 for entry in found.logprobs for token, _ in entry.top)


def test_each_sequence_uses_the_drafter_and_length_it_asked_for() -> None:
    drafter = ScriptedDrafter(lambda sequence, limit: [1] * limit)
    bench = Bench(drafter=drafter, k=8)
    for params in (
        GREEDY,
        replace(GREEDY, num_speculative_tokens=2),
        replace(GREEDY, num_speculative_tokens=0),
        replace(GREEDY, drafter="unheard of"),
        replace(GREEDY, max_tokens=3),
    ):
        bench.add(PROMPT, params)
    bench.run_step(limits={0: 4, 1: 4, 2: 4, 3: 4, 4: 4})
    assert drafter.asked == [(0, 4), (1, 2), (4, 2)]


@pytest.mark.parametrize("penalty", [2.0, -2.0])
@pytest.mark.case("V 18902")
def test_penalty_state_equals_the_committed_tokens_after_every_step(penalty: float) -> None:
    params = replace(GREEDY, frequency_penalty=penalty, presence_penalty=penalty, repetition_penalty=1.1)
    known = {i: alone(prompt, params).token_ids for i, prompt in enumerate(prompts(3))}
    bench = Bench(drafter=WrongDrafter(OracleDrafter(known), 3, VOCAB, error_rate=0.3), k=4)
    for prompt in prompts(3):
        bench.add(prompt, params)
    while bench.sequences:
        bench.run_step()
        states = bench.step._states
        assert states.keys() == bench.sequences.keys()
        for seq_id, sequence in bench.sequences.items():
            history = states[seq_id].history
            history.check_integrity(sequence.tokens)
            counts = dict(zip(history.seen_ids.tolist(), history.output_counts.tolist(), strict=True))
            assert {token: n for token, n in counts.items() if n} == Counter(sequence.output_token_ids)
    assert sum(step.stats.num_accepted for step in bench.steps) > 0
    assert sum(step.stats.rollback_tokens for step in bench.steps) > 0


def test_release_forgets_the_sequence() -> None:
    drafter = ScriptedDrafter(lambda sequence, limit: [])
    bench = Bench(drafter=drafter, k=1)
    bench.add(PROMPT, replace(GREEDY, min_tokens=2, max_tokens=3))
    bench.run()
    assert drafter.released == [0]
    assert not bench.step._states
    bench.step.release(12345)


def test_the_statistics_add_up() -> None:
    drafter = ScriptedDrafter(lambda sequence, limit: [1] * limit)
    bench = Bench(drafter=drafter, k=2)
    for prompt in prompts(3):
        bench.add(prompt, GREEDY)
    rows = sum(sequence.num_uncomputed for sequence in bench.sequences.values()) + 2 * 3
    result = bench.run_step()
    stats = result.stats
    assert stats.num_rows == rows
    assert stats.num_sequences == 3
    assert stats.num_drafted == 6
    assert stats.num_accepted == sum(output.num_accepted for output in result.outputs)
    assert stats.num_emitted == sum(len(output.token_ids) for output in result.outputs)
    assert list(stats.stage_seconds) == ["draft", "build", "verify", "accept", "rollback", "sync"]
    assert all(seconds >= 0 for seconds in stats.stage_seconds.values())
    assert set(stats.build_seconds) == {"positions", "slots", "block_tables", "mask"}
    assert all(seconds >= 0 for seconds in stats.build_seconds.values())


def test_building_a_batch_takes_no_longer_than_its_stage() -> None:
    bench = Bench()
    for prompt in prompts(3):
        bench.add(prompt, GREEDY)
    stats = bench.run_step().stats
    parts = [stats.build_seconds[part] for part in ("positions", "slots", "block_tables")]
    assert min(parts) > 0
    assert sum(parts) <= stats.stage_seconds["build"]


def test_an_empty_plan_is_an_empty_result() -> None:
    result = Bench().step.run(StepPlan(()))
    assert result.outputs == ()
    assert result.stats.num_rows == 0


def test_an_unknown_default_drafter_is_refused_with_its_name() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="'eagle'"):
        type(bench.step)(
            bench.executor, bench.manager, bench.storage, drafters={}, default_drafter="eagle", default_k=1
        )
