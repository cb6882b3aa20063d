"""Logprobs are log_softmax of the raw row, ordered by id on ties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specdec.errors import InvalidLogits
from specdec.logprobs import best_tokens, logsumexp, token_logprobs
from specdec.sampling import Sampler
from tests.specdec.builders import NumpyKernels


def random_row(seed: int, vocab: int = 2000, levels: int | None = None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(vocab) * 4 if levels is None else rng.integers(0, levels, vocab)
    return row.astype(np.float32)


def test_logprobs_equal_log_softmax_in_float64() -> None:
    row = random_row(0)
    expected = torch.log_softmax(torch.from_numpy(row).double(), dim=0).numpy()
    for token in range(0, 2000, 97):
        found = token_logprobs(row, token, 20)
        assert found.token_id == token
        assert found.logprob == pytest.approx(expected[token], abs=1e-12)
        assert [logprob for _, logprob in found.top] == pytest.approx(np.sort(expected)[::-1][:20].tolist(), abs=1e-12)


@pytest.mark.parametrize("levels", [None, 3, 50])
def test_rank_and_top_agree_and_equal_logits_are_ordered_by_id(levels: int | None) -> None:
    row = random_row(1, 500, levels)
    order = sorted(range(500), key=lambda token: (-row[token], token))
    assert best_tokens(row, 20) == order[:20]
    for place in (0, 1, 19, 20, 250, 499):
        assert token_logprobs(row, order[place], 0).rank == place + 1


def test_top_may_exceed_the_vocabulary() -> None:
    assert best_tokens(np.array([1.0, 3.0, 2.0], dtype=np.float32), 20) == [1, 2, 0]
    assert token_logprobs(np.array([1.0, 3.0], dtype=np.float32), 0, 0).top == ()


def test_large_logits_do_not_overflow() -> None:
    row = np.array([3e38, -3e38, 0.0], dtype=np.float32)
    found = token_logprobs(row, 0, 3)
    assert found.logprob == 0.0
    assert found.top[1][1] < -1e38


def test_an_impossible_token_has_logprob_minus_infinity() -> None:
    row = np.array([0.0, -math.inf, 0.0], dtype=np.float32)
    found = token_logprobs(row, 1, 3)
    assert found.logprob == -math.inf
    assert found.rank == 3
    assert found.top[0] == (0, pytest.approx(-math.log(2)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(NumpyKernels())], ids=["numpy", "kernels"])
def test_a_row_without_a_distribution_is_refused(bad: float, sampler: Sampler) -> None:
    rows = torch.zeros(3, 10)
    rows[1, 4] = bad
    with pytest.raises(InvalidLogits):
        sampler.normalisers(rows, 0, 3)
    assert sampler.normalisers(rows, 2, 1) == [logsumexp(rows[2].numpy())]


def test_a_rows_normaliser_does_not_depend_on_its_place() -> None:
    rows = torch.from_numpy(np.stack([random_row(seed, 4999) for seed in range(6)]))
    one_by_one = [logsumexp(row.copy()) for row in rows.numpy()]
    assert Sampler().normalisers(rows, 0, 6) == one_by_one
    assert Sampler().normalisers(rows, 3, 2) == one_by_one[3:5]
