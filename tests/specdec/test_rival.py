"""How close a race was: enough of a change to the logits turns it, anything less does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from specdec.params import SamplingParams
from specdec.rival import rival_gap
from specdec.sampling import SamplingState, sample_row

VOCAB = 50
KINDS = [
    SamplingParams(seed=3, temperature=0.0),
    SamplingParams(seed=3, temperature=1.0),
    SamplingParams(seed=3, temperature=0.4),
    SamplingParams(seed=3, temperature=1.7, logit_bias=((5, 2.0),), frequency_penalty=0.5),
]


def row_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def state_of(params: SamplingParams) -> SamplingState | None:
    return None if params.plain else SamplingState(params, [1, 2, 3], 1, VOCAB)


@pytest.mark.parametrize("params", KINDS, ids=lambda p: f"temperature {p.temperature}")
@pytest.mark.parametrize("seed", range(8))
def test_raising_the_rival_by_the_gap_turns_the_race_and_less_does_not(params: SamplingParams, seed: int) -> None:
    row = row_of(seed)
    winner = sample_row(row, params, 2, state_of(params))
    for rival in range(VOCAB):
        if rival == winner:
            continue
        gap = rival_gap(row, params, 2, winner, rival, state_of(params))
        for factor, expected in ((1.001, rival), (0.999, winner)):
            changed = row.copy()
            changed[rival] += gap * factor
            assert sample_row(changed, params, 2, state_of(params)) == expected, (rival, gap, factor)


FILTERED = [
    SamplingParams(seed=0),
    SamplingParams(seed=0, top_k=4),
    SamplingParams(seed=0, min_p=0.2, temperature=1.5),
    SamplingParams(seed=0, top_p=0.7),
    SamplingParams(seed=0, top_p=0.9, top_k=12, min_p=0.02, temperature=1.3),
]


@pytest.mark.parametrize("params", FILTERED, ids=lambda p: f"top_p {p.top_p}, top_k {p.top_k}, min_p {p.min_p}")
def test_what_a_small_change_of_the_logits_turns_is_within_twice_the_change(params: SamplingParams) -> None:
    rng = np.random.default_rng(1)
    change, turned = 0.02, 0
    for seed in range(1000):
        row = rng.normal(0, 2, VOCAB).astype(np.float32)
        kind = replace(params, seed=seed)
        other = row + rng.choice((-change, change), VOCAB).astype(np.float32)
        winner, rival = sample_row(row, kind, 1), sample_row(other, kind, 1)
        if winner != rival:
            turned += 1
            assert rival_gap(row, kind, 1, winner, rival) <= 2.1 * change, seed
    assert turned > 3


@pytest.mark.parametrize("params", FILTERED, ids=lambda p: f"top_p {p.top_p}, top_k {p.top_k}, min_p {p.min_p}")
def test_an_unrelated_token_does_not_nearly_tie(params: SamplingParams) -> None:
    rng = np.random.default_rng(2)
    close = 0
    for seed in range(300):
        row = rng.normal(0, 2, VOCAB).astype(np.float32)
        kind = replace(params, seed=seed)
        winner = sample_row(row, kind, 1)
        rival = (winner + int(rng.integers(1, VOCAB))) % VOCAB
        close += rival_gap(row, kind, 1, winner, rival) <= 0.1
    assert close < 30


def test_a_forbidden_rival_never_nearly_ties() -> None:
    params = SamplingParams(seed=3, allowed_token_ids=(1, 2))
    row = row_of(0)
    state = SamplingState(params, [1], 1, VOCAB)
    winner = sample_row(row, params, 0, state)
    assert rival_gap(row, params, 0, winner, 9, state) == math.inf
    assert rival_gap(row, params, 0, winner, VOCAB, state) == math.inf


def test_an_exact_tie_has_no_gap() -> None:
    row = np.zeros(VOCAB, dtype=np.float32)
    assert rival_gap(row, SamplingParams(seed=3, temperature=0.0), 0, 0, 7) == 0.0
