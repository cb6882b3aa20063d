"""Level 0: the same request gives the same tokens and logprobs, bit for bit, whatever drafts, batches and chunks do."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.kernels import get_kernels
from specdec.constraint import TokenConstraint
from specdec.drafters.base import Drafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.synthetic import EmptyDrafter, OracleDrafter, RandomDrafter, WrongDrafter
from specdec.params import SamplingParams
from specdec.pipeline import Mask
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from tests.specdec.builders import VOCAB, Bench, NumpyKernels, Result, ToyExecutor, alone, outputs, prompts

BASE = SamplingParams(seed=11, max_tokens=18, logprobs=2)
PARAMS = [
    replace(BASE, temperature=0.0),
    replace(BASE, temperature=1.0, seed=2**64 - 1),
    replace(BASE, temperature=0.0, frequency_penalty=2.0, presence_penalty=-2.0, repetition_penalty=1.2),
    replace(BASE, temperature=0.7, top_p=0.8, top_k=12, presence_penalty=2.0, frequency_penalty=-2.0),
    replace(BASE, temperature=1.2, min_p=0.05, logit_bias=((3, 2.0),), bad_words=((5,), (7, 8)), min_tokens=4),
    replace(BASE, temperature=0.0, stop_token_ids=frozenset({1, 2, 3, 4}), min_tokens=6),
]
PROMPTS = prompts(len(PARAMS))
Facts = tuple[object, ...]


def facts(result: Result) -> Facts:
    return (result.token_ids, result.logprobs, result.finish_reason, result.stop_token_id)


@pytest.fixture(scope="module")
def truth() -> list[Result]:
    """Each request alone, one token a step."""
    return [alone(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def make_drafter(name: str, truth: Mapping[int, list[int]], vocab: int = VOCAB) -> Drafter:
    oracle = OracleDrafter(truth)
    made: dict[str, Drafter] = {
        "random": RandomDrafter(1, vocab),
        "random, full": RandomDrafter(2, vocab, ragged=False),
        "oracle": oracle,
        "half wrong": WrongDrafter(oracle, 3, vocab, error_rate=0.4),
        "wrong": WrongDrafter(oracle, 4, vocab, error_rate=1.0),
        "empty": EmptyDrafter(),
        "ngram": NgramDrafter(vocab_size=vocab),
    }
    return made[name]


DRAFTERS = ["random", "random, full", "oracle", "half wrong", "wrong", "empty", "ngram"]


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.case("V 41758", "T 2208", "V 18902", "V 34497")
def test_speculation_on_equals_off(name: str, k: int, truth: list[Result]) -> None:
    block_size = (1, 4, 16)[(k + len(name)) % 3]
    drafter = make_drafter(name, {i: result.token_ids for i, result in enumerate(truth)})
    found = outputs(PROMPTS, PARAMS, drafter=drafter, k=k, block_size=block_size, poison=True)
    for seq_id, expected in enumerate(truth):
        assert facts(found[seq_id]) == facts(expected), (seq_id, name, k, block_size)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.case("T 11300")
def test_drafts_longer_than_a_block_change_nothing(block_size: int, truth: list[Result]) -> None:
    drafter = make_drafter("half wrong", {i: result.token_ids for i, result in enumerate(truth)})
    found = outputs(PROMPTS, PARAMS, drafter=drafter, k=8, block_size=block_size, poison=True)
    assert [facts(found[i]) for i in range(len(truth))] == [facts(result) for result in truth]


def test_an_oracle_is_accepted_entirely(truth: list[Result]) -> None:
    drafter = make_drafter("oracle", {i: result.token_ids for i, result in enumerate(truth)})
    bench = Bench(drafter=drafter, k=5)
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        bench.add(prompt, params)
    bench.run()
    drafted = sum(step.stats.num_drafted for step in bench.steps)
    assert drafted == sum(step.stats.num_accepted for step in bench.steps) > 0
    assert sum(step.stats.rollback_tokens for step in bench.steps) == 0


def test_the_batch_path_of_kernels_changes_nothing(truth: list[Result]) -> None:
    kernels = NumpyKernels()
    known = {i: result.token_ids for i, result in enumerate(truth)}
    for name, k in (("random", 0), ("random", 3), ("half wrong", 4)):
        found = outputs(PROMPTS, PARAMS, drafter=make_drafter(name, known), k=k, sampler=Sampler(kernels))
        for seq_id, expected in enumerate(truth):
            assert facts(found[seq_id]) == facts(expected)
    assert {name for name, _ in kernels.calls} == {"argmax_rows", "keyed_sample_rows", "logsumexp_rows"}


@pytest.mark.case("V 6038")
def test_requests_with_equal_seeds_are_equal_and_others_differ() -> None:
    params = [replace(BASE, seed=seed) for seed in (1, 1, 2, 3)]
    found = outputs([PROMPTS[2]] * 4, params, drafter=NgramDrafter(vocab_size=VOCAB), k=4)
    assert found[0].token_ids == found[1].token_ids
    assert len({tuple(result.token_ids) for result in found.values()}) == 3


class EvenThenOdd(TokenConstraint):
    """A toy grammar: an even id must be followed by an odd one and the other way round."""

    def applies(self, sequence: Sequence) -> bool:
        return sequence.seq_id % 2 == 0

    def mask(self, sequence: Sequence, drafts: object) -> Mask | None:
        last = drafts[-1] if drafts else sequence.tokens[-1]  # type: ignore[index]
        return np.arange(VOCAB) % 2 != last % 2

    def release(self, seq_id: int) -> None:
        pass


@pytest.mark.parametrize("name", ["random", "oracle", "half wrong"])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(NumpyKernels())], ids=["numpy", "kernels"])
def test_a_constraint_holds_on_every_row_and_only_for_whom_it_applies(
    name: str, sampler: Sampler, truth: list[Result]
) -> None:
    off = outputs(PROMPTS, PARAMS, constraint=EvenThenOdd(), sampler=sampler)
    drafter = make_drafter(name, {i: result.token_ids for i, result in off.items()})
    on = outputs(PROMPTS, PARAMS, constraint=EvenThenOdd(), drafter=drafter, k=4, sampler=sampler)
    for seq_id, expected in enumerate(truth):
        assert facts(on[seq_id]) == facts(off[seq_id])
        if seq_id % 2:
            assert facts(on[seq_id]) == facts(expected)
        else:
            path = [PROMPTS[seq_id][-1], *on[seq_id].token_ids]
            assert all((a + b) % 2 for a, b in itertools.pairwise(path))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
@pytest.mark.case("S 33395")
def test_random_plans_always_give_the_same_tokens(seed: int, truth: list[Result]) -> None:
    """Random admission, chunks, draft limits, drafters, block sizes and preemptions."""
    rng = random.Random(seed)
    known = {i: result.token_ids for i, result in enumerate(truth)}
    bench = Bench(
        drafter=make_drafter(rng.choice(DRAFTERS), known),
        k=8,
        block_size=rng.choice([1, 3, 4, 16]),
        sampler=Sampler(rng.choice([NumpyKernels(), None])),
        poison=True,
    )
    waiting = list(range(len(PROMPTS)))
    while waiting or bench.sequences:
        while waiting and (not bench.sequences or rng.random() < 0.5):
            bench.add(PROMPTS[waiting[0]], PARAMS[waiting.pop(0)])
        running = list(bench.sequences)
        if rng.random() < 0.1:
            bench.preempt(rng.choice(running))
        chosen = rng.sample(running, rng.randint(1, len(running)))
        chunks = {seq_id: rng.choice([1, 2, 5, 100]) for seq_id in chosen}
        bench.run_step(chunks, {seq_id: rng.randint(0, 8) for seq_id in chosen})
    for seq_id, expected in enumerate(truth):
        assert facts(bench.results[seq_id]) == facts(expected)


@pytest.mark.case("V 42960")
def test_planted_ties_go_to_the_lowest_id_with_and_without_drafts() -> None:
    executor = ToyExecutor()

    def hook(logits: np.ndarray, token_ids: list[int]) -> None:
        logits[[6, 13, 30]] = logits.max() + 1 if len(token_ids) % 3 else logits.max()

    executor.logit_hook = hook
    for params in (replace(BASE, temperature=0.0), replace(BASE, temperature=0.0, presence_penalty=0.01)):
        for sampler in (Sampler(), Sampler(NumpyKernels()), Sampler(get_kernels())):
            off = alone(PROMPTS[1], params, executor=executor, sampler=sampler)
            assert off.token_ids[0] == 6
            for name in ("oracle", "random, full"):
                drafter = make_drafter(name, {0: off.token_ids})
                on = outputs([PROMPTS[1]], params, executor=executor, sampler=sampler, drafter=drafter, k=4)[0]
                assert facts(on) == facts(off)
