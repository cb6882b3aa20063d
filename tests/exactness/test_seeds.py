"""The seed matrix: a sampled answer is a function of its seed, in every shape of batch and at every preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.offline import Completion, OfflineConfig, run_offline
from specdec.params import SamplingParams
from tests.exactness.builders import Subject
from tests.exactness.conditions import REFERENCE

SEEDS = (0, 1, 2**31, 2**53 - 1, 2**63, 2**64 - 1)
SAMPLED = SamplingParams(seed=0, max_tokens=6, temperature=1.0, logprobs=1)
CHANGES = ({}, {"top_p": 0.9, "temperature": 1.4}, {"presence_penalty": 1.0, "top_k": 40})
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def requests(quick_subject: Subject) -> list[Request]:
    prompt = quick_subject.requests[5][0]
    return [(prompt, replace(SAMPLED, seed=seed, **change)) for change in CHANGES for seed in SEEDS]


@pytest.fixture(scope="module")
def alone(quick_subject: Subject, requests: list[Request]) -> list[Completion]:
    return run_offline(quick_subject.executor, REFERENCE.config, requests, batch=1)


@pytest.mark.case("S 33395")
@pytest.mark.parametrize(
    ("batch", "budget", "preempt"), [(1, 5, False), (3, 512, True), (8, 64, False), (8, 16, True), (21, 512, False)]
)
def test_a_seed_gives_its_answer_in_every_shape_of_batch(
    quick_subject: Subject, requests: list[Request], alone: list[Completion], batch: int, budget: int, preempt: bool
) -> None:
    for k in (0, 4):
        config = OfflineConfig(
            num_speculative_tokens=k, max_num_batched_tokens=budget, preempt_every_step=preempt, block_size=4
        )
        assert run_offline(quick_subject.executor, config, requests, batch=batch) == alone, k


@pytest.mark.case("V 6038")
def test_different_seeds_give_different_answers(alone: list[Completion]) -> None:
    for i in range(len(CHANGES)):
        group = alone[i * len(SEEDS) : (i + 1) * len(SEEDS)]
        assert len({answer.token_ids for answer in group}) == len(SEEDS)
