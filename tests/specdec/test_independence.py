"""Noise of different seeds, positions, choices and tokens is independent and uniform to its last bits."""

from __future__ import annotations

import numpy as np
import pytest

from model.kernels import get_kernels
from specdec.noise import exponentials, uniforms
from tests.specdec.gtest import POWER, Family, worst_power
from tests.specdec.keyed import seed_range, uniforms_of
from tests.specdec.noise_pairs import BINS, NUMBER, PAIRS, bit_p_values, pair_p_values

EXTREMES = (0, 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1)
STEPS = (0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3)


@pytest.mark.parametrize("name", PAIRS)
def test_noise_at_two_places_is_independent(name: str, family: Family) -> None:
    for statistic, p in pair_p_values(PAIRS[name]):
        family.accept(f"{statistic}, {name}", p)


def test_all_bits_of_the_noise_are_uniform(family: Family) -> None:
    for statistic, p in bit_p_values():
        family.accept(statistic, p)


def test_tables_of_pairs_see_an_error_of_two_percent() -> None:
    assert worst_power(np.full(BINS**2, 1.0 / BINS**2), NUMBER) >= POWER


@pytest.mark.parametrize("t", STEPS)
def test_the_noise_that_is_tested_here_is_the_samplers_for_extreme_and_random_seeds(t: int) -> None:
    seeds = np.concatenate([np.array(EXTREMES, dtype=np.uint64), seed_range(30, 2**60 + 7 * t)])
    ids = np.array([0, 1, 2, 7, 8, 49151, 151935, 2**31])
    found = uniforms_of(seeds, t, ids)
    for i, seed in enumerate(seeds.tolist()):
        assert np.array_equal(found[i], uniforms(seed, t, ids))
        assert np.array_equal(-np.log(found[i, :5]), exponentials(seed, t, ids[:5], 49152))


def test_the_kernels_noise_is_the_same_for_extreme_seeds() -> None:
    kernels = get_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels on this machine")
    seeds = np.array(EXTREMES, dtype=np.uint64)
    for t in STEPS:
        found = uniforms_of(seeds, t, np.arange(33))
        for i, pattern in enumerate(seeds.view(np.int64).tolist()):
            assert np.array_equal(kernels.keyed_uniforms(pattern, t, 33).numpy(), found[i])
