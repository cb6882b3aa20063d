"""The law of emitted tokens is the processed distribution, whatever the drafts; and the test has teeth."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from specdec.noise import mix_seed, uniforms
from specdec.params import SamplingParams
from specdec.sampling import sample_token
from specdec.verification import verify
from tests.specdec.laws import follows, naive_law

PROMPT = [1]
LOGITS = np.array([0.3, -0.5, 1.4, 0.9, -1.2, 0.35, 0.0, 1.1], dtype=np.float32)
AFTER = np.array([-0.2, 0.8, 0.1, -0.6, 0.5, 1.0, -1.0, 0.2], dtype=np.float32)  # whatever the first token was
DRAFT_LOGITS = np.array([1.2, 0.1, 0.3, 0.0, 0.9, -1.0, 0.6, 0.4], dtype=np.float32)
RUNS = 2500
BASE = SamplingParams(seed=0)
CASES = {
    "temperature 1": BASE,
    "temperature 0.6": replace(BASE, temperature=0.6),
    "temperature 1.6": replace(BASE, temperature=1.6),
    "top_k 3": replace(BASE, top_k=3),
    "top_p 0.7": replace(BASE, top_p=0.7),
    "min_p 0.3": replace(BASE, min_p=0.3),
    "all of them": replace(BASE, temperature=1.3, min_p=0.15, top_k=5, top_p=0.9),
    "penalties and bias": replace(BASE, repetition_penalty=1.3, presence_penalty=0.7, logit_bias=((3, 1.0),)),
}


def shared_noise_draft(params: SamplingParams, history: list[int]) -> int:
    """A draft as a draft model gives it: another law, the same noise."""
    return sample_token(DRAFT_LOGITS, params, history, len(PROMPT))


@functools.cache
def emitted(name: str) -> list[tuple[int, ...]]:
    """What verification of one shared-noise draft emits, for many seeds."""
    runs = []
    for i in range(RUNS):
        own = replace(CASES[name], seed=mix_seed(1234, i))
        drafts = [shared_noise_draft(own, PROMPT)]
        rows = [LOGITS, AFTER]
        verdict = verify(
            drafts,
            lambda row, own=own, drafts=drafts, rows=rows: sample_token(  # type: ignore[misc]
                rows[row], own, PROMPT + drafts[:row], len(PROMPT)
            ),
            stop_token_ids=(),
            tokens_left=9,
        )
        runs.append(verdict.token_ids)
    return runs


@pytest.mark.parametrize("name", CASES)
def test_the_first_emitted_token_follows_the_processed_distribution(name: str) -> None:
    assert follows([run[0] for run in emitted(name)], naive_law(LOGITS.tolist(), CASES[name], PROMPT, 1))


def test_the_bonus_token_follows_its_own_law_given_the_accepted_draft() -> None:
    runs = [run for run in emitted("temperature 1") if len(run) == 2]
    assert len(runs) > RUNS // 4
    assert follows([run[1] for run in runs], naive_law(AFTER.tolist(), BASE, [1, 2], 1))


@pytest.mark.parametrize("name", [name for name in CASES if name != "temperature 1"])
def test_each_parameter_would_be_missed_if_it_were_ignored(name: str) -> None:
    assert not follows([run[0] for run in emitted("temperature 1")], naive_law(LOGITS.tolist(), CASES[name], PROMPT, 1))


def test_a_mutant_that_reuses_the_drafts_noise_in_a_ratio_test_fails() -> None:
    target = naive_law(LOGITS.tolist(), BASE, PROMPT, 1)
    draft = naive_law(DRAFT_LOGITS.tolist(), BASE, PROMPT, 1)
    rest = np.maximum(np.array(target) - np.array(draft), 0.0)

    def rejection_sampling(own: SamplingParams, fresh: bool) -> int:
        token = shared_noise_draft(own, PROMPT)
        chance = uniforms(mix_seed(own.seed, 77) if fresh else own.seed, 0, np.array([token]))[0]
        if chance < target[token] / draft[token]:
            return token
        # The remainder is drawn with noise of its own in both, so that only the ratio test differs.
        times = -np.log(uniforms(mix_seed(own.seed, 78), 0, np.arange(len(target))))
        with np.errstate(divide="ignore"):
            return int((times / rest).argmin())

    seeds = [replace(BASE, seed=mix_seed(1234, i)) for i in range(RUNS)]
    assert follows([rejection_sampling(own, fresh=True) for own in seeds], target)
    assert not follows([rejection_sampling(own, fresh=False) for own in seeds], target)


def test_choices_and_output_indices_are_independent() -> None:
    base = replace(BASE, top_k=4)
    law = naive_law(LOGITS.tolist(), base, PROMPT, 1)
    joint = [x * y for x in law for y in law]
    pairs, steps = [], []
    for i in range(RUNS):
        first, second = (replace(base, seed=mix_seed(i, j)) for j in range(2))
        one, other = sample_token(LOGITS, first, PROMPT, 1), sample_token(LOGITS, second, PROMPT, 1)
        later = sample_token(LOGITS, first, [1, 2], 1)
        pairs.append(one * len(law) + other)
        steps.append(one * len(law) + later)
    assert follows(pairs, joint)
    assert follows(steps, joint)
