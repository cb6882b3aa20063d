"""Argmax, logsumexp and keyed sampling of logits rows against plain references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.noise import uniforms_of_all
from tests.model.kernel_builders import need_kernels, random


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in plain integers (Salmon et al., 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0], c[1], c[2], c[3]


def uniforms(seed: int, step: int, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = np.empty(count)
    for token in range(count):
        words = philox(
            (token >> 1, step & 0xFFFFFFFF, step >> 32, 0x7D1), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
        )
        low, high = words[2:] if token & 1 else words[:2]
        found[token] = min((float(((high << 32) | low) >> 11) + 0.5) * 2.0**-53, 1 - 2.0**-53)
    return found


def reference(
    row: Tensor,
    temperature: float,
    seed: int,
    step: int,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    noise: np.ndarray[Any, np.dtype[np.float64]] | None = None,
) -> int:
    logits = row.numpy().astype(np.float64)
    scores = (logits - logits.max()) / temperature
    order = np.lexsort((np.arange(len(scores)), -scores))  # best first, lowest id first on a tie
    order = order[scores[order] >= math.log(min_p)] if min_p > 0 else order[scores[order] > -np.inf]
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        weights = np.exp(scores[order])
        order = order[: int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1]
    kept = np.sort(order)
    with np.errstate(over="ignore"):
        times = -np.log((uniforms(seed, step, len(logits)) if noise is None else noise)[kept]) * np.exp(-scores[kept])
    return int(kept[times.argmin()])


def signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def test_philox_reference_gives_the_published_vectors() -> None:
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones, ones, ones, ones), (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("seed", [0, 1, 2**53 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("step", [0, 7, 2**33 + 5])
def test_uniforms_are_the_keyed_ones_bit_for_bit(seed: int, step: int) -> None:
    kernels = need_kernels()
    assert (kernels.keyed_uniforms(signed(seed), step, 301).numpy() == uniforms(seed, step, 301)).all()


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 151])
@pytest.mark.parametrize("temperature", [1e-9, 0.3, 1.0, 5.0, 1e6])
def test_whole_distribution_race_picks_the_reference_token(vocab: int, temperature: float) -> None:
    kernels = need_kernels()
    rows = 40
    logits = random(rows, vocab) * 4
    seeds = [(r * 0x9E3779B97F4A7C15) % 2**64 for r in range(rows)]
    found = kernels.keyed_sample_rows(
        logits,
        torch.full((rows,), temperature, dtype=torch.float64),
        torch.tensor([signed(seed) for seed in seeds]),
        torch.arange(rows),
    )
    assert found.tolist() == [reference(logits[r], temperature, seeds[r], r) for r in range(rows)]


@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
def test_filtered_race_picks_the_reference_token(min_p: float, top_k: int, top_p: float) -> None:
    kernels = need_kernels()
    rows, vocab = 24, 97
    logits = (random(rows, vocab) * 3).round(decimals=1)  # ties at the borders
    logits[0] = 1.5  # nothing but ties
    logits[1, 5:] = -math.inf
    found = kernels.keyed_sample_rows(
        logits,
        torch.full((rows,), 0.8, dtype=torch.float64),
        torch.arange(rows),
        torch.full((rows,), 3),
        min_p=torch.full((rows,), min_p, dtype=torch.float64),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
    )
    assert found.tolist() == [reference(logits[r], 0.8, r, 3, min_p, top_k, top_p) for r in range(rows)]


@pytest.mark.parametrize("flatness", [0.02, 1.0, 4.0])  # all but equal, and peaked as a language model's
@pytest.mark.parametrize("filters", [(0.0, 0), (0.02, 0), (0.0, 40), (0.0, 3000), (1e-4, 3000)], ids=str)
@pytest.mark.parametrize("top_p", [1.0, 0.9999999, 0.9, 0.5, 0.01])
def test_filters_of_a_long_row_keep_what_sorting_it_keeps(
    flatness: float, filters: tuple[float, int], top_p: float
) -> None:
    kernels = need_kernels()
    rows, vocab, (min_p, top_k) = 4, 20_003, filters
    logits = random(rows, vocab) * flatness
    logits[0] = logits[0].round(decimals=1)
    logits[1, 100:19_000] = -math.inf
    found = kernels.keyed_sample_rows(
        logits,
        torch.full((rows,), 1.3, dtype=torch.float64),
        torch.arange(rows),
        torch.full((rows,), 11),
        min_p=torch.full((rows,), min_p, dtype=torch.float64),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
    )
    assert found.tolist() == [
        reference(logits[r], 1.3, r, 11, min_p, top_k, top_p, uniforms_of_all(r, 11, vocab)) for r in range(rows)
    ]


@pytest.mark.parametrize("vocab", [60, 3001])
@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (600, 1.0), (0, 0.5), (40, 0.9)])
def test_logits_whose_scores_are_equal_tie(vocab: int, top_k: int, top_p: float) -> None:
    kernels = need_kernels()
    rows = 40
    logits = torch.full((vocab,), 1e-20) * torch.arange(vocab)  # all of them are lost beside 2
    logits[vocab // 2] = 2.0
    found = kernels.keyed_sample_rows(
        logits.expand(rows, -1),
        torch.full((rows,), 2.0, dtype=torch.float64),
        torch.full((rows,), 5),
        torch.arange(rows),
        top_k=torch.full((rows,), top_k),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
    )
    noise = [uniforms_of_all(5, r, vocab) for r in range(rows)]
    assert found.tolist() == [reference(logits, 2.0, 5, r, 0.0, top_k, top_p, noise[r]) for r in range(rows)]


@pytest.mark.parametrize("share", [0.25, 0.25 - 1e-9, 0.25 + 1e-9])
def test_a_nucleus_ends_where_the_mass_in_float64_says(share: float) -> None:
    kernels = need_kernels()
    rows = 400  # draws: whether the 17th of 64 equals takes part shows in some of them
    logits = torch.full((500,), -math.inf)
    logits[3:500:7][:64] = 2.5
    found = kernels.keyed_sample_rows(
        logits.expand(rows, -1),
        torch.full((rows,), 0.7, dtype=torch.float64),
        torch.full((rows,), 5),
        torch.arange(rows),
        top_p=torch.full((rows,), share, dtype=torch.float64),
    )
    kept = 17 if share > 0.25 else 16
    assert set(found.tolist()) == {3 + 7 * i for i in range(kept)}


def test_frequencies_follow_the_distribution() -> None:
    kernels = need_kernels()
    draws = 20_000
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -3.0, 0.5])
    found = kernels.keyed_sample_rows(
        logits.expand(draws, -1),
        torch.full((draws,), 1.3, dtype=torch.float64),
        torch.full((draws,), 42),
        torch.arange(draws),
    )
    expected = (logits.double() / 1.3).softmax(-1) * draws
    counts = torch.bincount(found, minlength=6).double()
    assert float(((counts - expected) ** 2 / expected).sum()) < 25.0  # chi-squared with 5 degrees of freedom: p < 2e-4


@pytest.mark.case("V 42960")
def test_argmax_takes_the_lowest_id_on_a_tie() -> None:
    kernels = need_kernels()
    logits = random(50, 203).round(decimals=0)
    assert torch.equal(kernels.argmax_rows(logits), torch.from_numpy(logits.numpy().argmax(-1)))


def test_logsumexp_equals_float64_reference() -> None:
    kernels = need_kernels()
    logits = random(9, 4099) * 30
    logits[3, ::2] = -math.inf
    torch.testing.assert_close(kernels.logsumexp_rows(logits), logits.double().logsumexp(-1), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
def test_row_without_a_valid_result_is_marked_and_leaves_the_others_alone(bad: str) -> None:
    kernels = need_kernels()
    logits = random(5, 67)
    parameters = (torch.ones(5, dtype=torch.float64), torch.arange(5), torch.arange(5))
    clean = [kernels.argmax_rows(logits), kernels.keyed_sample_rows(logits, *parameters)]
    normalisers = kernels.logsumexp_rows(logits)
    if bad == "all -inf":
        logits[2] = -math.inf
    else:
        logits[2, 66] = float(bad)
    others = torch.tensor([0, 1, 3, 4])
    for before, after in zip(
        clean, [kernels.argmax_rows(logits), kernels.keyed_sample_rows(logits, *parameters)], strict=True
    ):
        assert after[2] == -1
        assert torch.equal(after[others], before[others])
    after = kernels.logsumexp_rows(logits)
    assert after[2].isnan()
    assert torch.equal(after[others], normalisers[others])


def test_rows_do_not_depend_on_their_batch_or_on_threads() -> None:
    kernels = need_kernels()
    rows = 9
    logits = random(rows, 3001) * 5
    temperatures, seeds, steps = torch.rand(rows, dtype=torch.float64) + 0.5, torch.arange(rows), torch.arange(rows) * 3
    for threads in (1, 2):
        tokens = kernels.keyed_sample_rows(logits, temperatures, seeds, steps, threads=threads)
        normalisers = kernels.logsumexp_rows(logits, threads=threads)
        for r in range(rows):
            one = slice(r, r + 1)
            assert tokens[r] == kernels.keyed_sample_rows(logits[one], temperatures[one], seeds[one], steps[one])[0]
            assert normalisers[r] == kernels.logsumexp_rows(logits[one])[0]


def test_temperature_must_be_positive() -> None:
    kernels = need_kernels()
    with pytest.raises(RuntimeError, match=r"temperature\[0\] must be positive, got 0"):
        kernels.keyed_sample_rows(
            random(1, 8), torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), torch.tensor([0])
        )
