"""A token is a function of its row, parameters, history, seed and output index; every path gives the same one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.errors import InvalidLogits
from specdec.noise import uniforms
from specdec.params import SamplingParams
from specdec.sampling import Kernels, RowJob, Sampler, SamplingState, sample_row, sample_token
from tests.specdec.builders import NumpyKernels

VOCAB = 300
BASE = SamplingParams(seed=2**64 - 5)
GREEDY = replace(BASE, temperature=0.0)
PLAIN = {
    "greedy": GREEDY,
    "temperature 1": BASE,
    "hot": replace(BASE, temperature=1.9),
    "cold": replace(BASE, temperature=0.01),
    "top_k": replace(BASE, top_k=7),
    "top_p": replace(BASE, top_p=0.6),
    "min_p": replace(BASE, min_p=0.05),
    "all filters": replace(BASE, min_p=0.01, top_k=30, top_p=0.8),
}


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32))


def compiled_kernels() -> Kernels | None:
    """The real kernels, where they are built and this processor runs them."""
    try:
        from model.kernels import get_kernels
    except ImportError:
        return None
    kernels: Kernels | None = get_kernels()
    return kernels


@pytest.fixture(params=["numpy", "compiled"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "numpy":
        return NumpyKernels()
    found = compiled_kernels()
    if found is None:
        pytest.skip("no compiled kernels on this machine")
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_the_batch_call_and_the_row_path_give_the_same_tokens(name: str, kernels: Kernels) -> None:
    rows = logits(40, vocab=1203)
    params = PLAIN[name]
    jobs = [RowJob(0, 9, params, 0), RowJob(12, 28, replace(params, seed=3), 2**33)]
    tokens = Sampler(kernels).sample_batch(rows, jobs)
    assert sorted(tokens) == [*range(9), *range(12, 40)]
    for job in jobs:
        for i in range(job.count):
            row = rows[job.first_row + i].numpy()
            assert tokens[job.first_row + i] == sample_row(row, job.params, job.t + i)


def test_a_mixed_batch_is_one_argmax_and_one_keyed_call() -> None:
    kernels = NumpyKernels()
    rows = logits(13)
    jobs = [
        RowJob(0, 2, GREEDY, 0),
        RowJob(2, 6, BASE, 5),
        RowJob(8, 1, GREEDY, 1),
        RowJob(9, 4, replace(BASE, top_k=2), 0),
    ]
    tokens = Sampler(kernels).sample_batch(rows, jobs)
    assert kernels.calls == [("argmax_rows", 3), ("keyed_sample_rows", 10)]
    expected = {
        job.first_row + i: sample_row(rows[job.first_row + i].numpy(), job.params, job.t + i)
        for job in jobs
        for i in range(job.count)
    }
    assert tokens == expected


@pytest.mark.parametrize("name", PLAIN)
def test_a_state_that_changes_nothing_gives_the_plain_token(name: str) -> None:
    for i, row in enumerate(logits(20).numpy()):
        params = PLAIN[name]
        state = SamplingState(replace(params, logit_bias=((0, 0.0),)), [1, 2], 1, VOCAB)
        assert sample_row(row, params, i, state) == sample_row(row, params, i)
        assert sample_token(row, params, [1] * (3 + i), 3) == sample_row(row, params, i)


CHANGED = {
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    "bias": {"logit_bias": ((3, 4.1), (70, -100.0), (299, 2.3))},
    "masks": {"bad_words": ((5,), (1, 9)), "min_tokens": 99, "stop_token_ids": frozenset({11, 12})},
    "few tokens": {"allowed_token_ids": (4, 90, 200)},
}


@pytest.mark.parametrize("changed", CHANGED)
@pytest.mark.parametrize("name", PLAIN)
def test_a_changed_row_gives_one_token_with_the_kernels_and_without(name: str, changed: str, kernels: Kernels) -> None:
    params = replace(PLAIN[name], **CHANGED[changed])  # type: ignore[arg-type]
    mask = np.arange(VOCAB) % 3 > 0
    mask[[4, 90]] = True
    for t, row in enumerate(logits(12).numpy()):
        state = SamplingState(params, [1, *range(0, 10 * t, 10)], 1, VOCAB)
        for allowed in (None, mask):
            expected = sample_row(row, params, t, state, allowed)
            assert Sampler(kernels).sample_row(row, params, t, state, allowed) == expected
    if isinstance(kernels, NumpyKernels):
        assert len(kernels.calls) == (0 if params.greedy else 24)


def test_where_a_mask_leaves_one_token_no_row_is_sampled(kernels: Kernels) -> None:
    row = np.full(VOCAB, math.nan, dtype=np.float32)
    state = SamplingState(BASE, [1], 1, VOCAB)
    assert Sampler(kernels).sample_row(row, BASE, 0, state, np.arange(VOCAB) == 7) == 7


@pytest.mark.parametrize("path", ["numpy", "state", "kernels"])
@pytest.mark.case("V 42960")
def test_an_exact_tie_goes_to_the_lowest_id(path: str) -> None:
    row = logits(1)[0]
    row[[17, 80, 299]] = row.max() + 1
    if path == "numpy":
        token = sample_row(row.numpy(), GREEDY, 0)
    elif path == "state":
        token = sample_token(row.numpy(), replace(GREEDY, logit_bias=((5, 0.0),)), [1], 1)
    else:
        token = Sampler(compiled_kernels() or NumpyKernels()).sample_batch(row[None], [RowJob(0, 1, GREEDY, 0)])[0]
    assert token == 17


def test_the_race_is_won_by_the_smallest_time_over_weight() -> None:
    for t, row in enumerate(logits(50).numpy()):
        law = np.exp(row.astype(np.float64) - row.max())
        times = -np.log(uniforms(BASE.seed, t, np.arange(VOCAB))) / law
        assert sample_row(row, BASE, t) == times.argmin()


def test_a_filter_that_keeps_the_winner_does_not_change_the_token() -> None:
    """Noise belongs to the token id, not to its place among the survivors."""
    same = 0
    for t, row in enumerate(logits(100).numpy()):
        winner = sample_row(row, BASE, t)
        if winner in np.argsort(-row)[:40]:
            same += 1
            assert sample_row(row, replace(BASE, top_k=40), t) == winner
            assert sample_token(row, replace(BASE, bad_words=(((winner + 1) % VOCAB,),)), [0] * (t + 1), 1) == winner
    assert same > 50


def test_seeds_and_output_indices_give_different_tokens() -> None:
    flat = np.zeros(VOCAB, dtype=np.float32)
    assert len({sample_row(flat, replace(BASE, seed=seed), 0) for seed in range(64)}) > 50
    assert len({sample_row(flat, BASE, t) for t in range(64)}) > 50


@pytest.mark.parametrize("params", [GREEDY, BASE, replace(BASE, top_k=3), replace(GREEDY, presence_penalty=1.0)])
@pytest.mark.parametrize(
    ("value", "where", "error"),
    [(math.nan, 7, InvalidLogits), (math.inf, 7, InvalidLogits), (-math.inf, slice(None), InvalidLogits)],
)
def test_a_row_without_a_distribution_is_refused(
    params: SamplingParams, value: float, where: int | slice, error: type[Exception], kernels: Kernels
) -> None:
    rows = logits(3)
    rows[1][where] = value
    with pytest.raises(error):
        sample_token(rows[1].numpy(), params, [1], 1)
    sampler = Sampler(kernels)
    with pytest.raises(error):
        sampler.sample_row(rows[1].numpy(), params, 0, SamplingState(params, [1], 1, VOCAB))
    if sampler.batchable(params):
        tokens = sampler.sample_batch(rows, [RowJob(0, 3, params, 0)])
        assert tokens[1] == -1
        assert tokens[0] >= 0
        assert tokens[2] >= 0


def test_minus_infinity_is_a_token_that_cannot_be(kernels: Kernels) -> None:
    row = torch.full((VOCAB,), -math.inf)
    row[250] = -4.0
    for params in PLAIN.values():
        assert sample_row(row.numpy(), params, 3) == 250
        assert Sampler(kernels).sample_batch(row[None], [RowJob(0, 1, params, 3)]) == {0: 250}


def test_only_parameters_decide_which_path_a_sequence_takes() -> None:
    assert all(Sampler(NumpyKernels()).batchable(params) for params in PLAIN.values())
    assert not any(Sampler().batchable(params) for params in PLAIN.values())
    for changed in (
        replace(BASE, frequency_penalty=1.0),
        replace(BASE, logit_bias=((1, 1.0),)),
        replace(BASE, min_tokens=1),
        replace(BASE, bad_words=((1,),)),
        replace(BASE, allowed_token_ids=(1,)),
    ):
        assert not Sampler(NumpyKernels()).batchable(changed)
