"""Rejection sampling and block verification emit the target's law exactly; mutants of them are caught."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from specdec.noise import mix_seed
from tests.specdec.gtest import ALPHA, POWER, Family, p_value, power_against
from tests.specdec.keyed import Floats, seed_range, uniforms_of, winners
from tests.specdec.reference_verifiers import (
    Laws,
    Prefix,
    Verifier,
    block_verification,
    emitted_law,
    rejection_sampling,
    target_law,
)
from tests.specdec.test_law import NUMBER
from tests.specdec.verifier_mutants import MUTANTS, VOCAB, K, Mutant, accepts_on_equality

EXACT = 1e-12
VERIFIERS = {"rejection sampling": rejection_sampling, "block verification": block_verification}


def random_laws(seed: int, vocab: int, *, zeros: float = 0.0, spread: float = 1.0) -> Laws:
    """A law for every prefix; ``zeros``: the share of impossible tokens."""

    @functools.cache
    def law(prefix: Prefix) -> Floats:
        rng = np.random.default_rng([seed, *prefix])
        weights = np.exp(spread * rng.standard_normal(vocab)) * (rng.random(vocab) >= zeros)
        weights[rng.integers(vocab)] += 0.1
        found: Floats = weights / weights.sum()
        return found

    return law


def always(*law: float) -> Laws:
    return lambda prefix: np.array(law)


PAIRS: dict[str, tuple[Laws, Laws, int]] = {
    "random": (random_laws(1, 3), random_laws(2, 3), 3),
    "random, four tokens": (random_laws(3, 4), random_laws(4, 4), 4),
    "far apart": (random_laws(5, 3, spread=3.0), random_laws(6, 3, spread=3.0), 3),
    "with impossible tokens": (random_laws(7, 4, zeros=0.4), random_laws(8, 4, zeros=0.4), 4),
    "a draft like the target": (random_laws(9, 3), random_laws(9, 3), 3),
    "a greedy draft": (random_laws(10, 3), always(0.0, 1.0, 0.0), 3),
    "a greedy target": (always(0.0, 0.0, 1.0), random_laws(11, 3), 3),
    "nothing in common": (always(0.3, 0.7, 0.0, 0.0), always(0.0, 0.0, 0.5, 0.5), 4),
    "alike at first only": (
        lambda prefix: random_laws(12, 3)(prefix if len(prefix) > 1 else (9,)),
        lambda prefix: random_laws(13, 3)(prefix) if len(prefix) > 1 else random_laws(12, 3)((9,)),
        3,
    ),
}


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_emitted_law_is_the_targets(verifier: str, pair: str, k: int) -> None:
    target, draft, vocab = PAIRS[pair]
    law, _ = emitted_law(VERIFIERS[verifier], target, draft, vocab, k)
    assert np.abs(law - target_law(target, vocab, k + 1)).max() < EXACT


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_block_verification_accepts_at_least_as_many(pair: str, k: int) -> None:
    target, draft, vocab = PAIRS[pair]
    tokenwise = emitted_law(rejection_sampling, target, draft, vocab, k)[1]
    blockwise = emitted_law(block_verification, target, draft, vocab, k)[1]
    assert blockwise >= tokenwise - EXACT
    if k == 1:
        assert blockwise == pytest.approx(tokenwise, abs=EXACT)


@pytest.mark.parametrize(("verifier", "expected"), [(rejection_sampling, 10 / 9), (block_verification, 11 / 9)])
def test_the_papers_example_has_the_papers_numbers(verifier: Verifier, expected: float) -> None:
    target, draft = always(1 / 3, 2 / 3), always(2 / 3, 1 / 3)
    assert emitted_law(verifier, target, draft, 2, 2)[1] == pytest.approx(expected, abs=EXACT)


def test_rejection_sampling_accepts_with_one_minus_the_total_variation() -> None:
    for seed in range(20):
        target, draft = random_laws(seed, 4), random_laws(100 + seed, 4)
        distance = np.abs(target(()) - draft(())).sum() / 2
        assert emitted_law(rejection_sampling, target, draft, 4, 1)[1] == pytest.approx(1 - distance, abs=EXACT)


@pytest.mark.parametrize("name", MUTANTS)
def test_enumeration_and_the_g_test_reject_the_mutant(name: str) -> None:
    mutant = MUTANTS[name]
    truth = target_law(mutant.truth, VOCAB, K + 1).ravel()
    law = emitted_law(mutant.verifier, mutant.seen or mutant.truth, mutant.draft, VOCAB, K, mutant.truth)[0].ravel()
    assert law.sum() == pytest.approx(1.0, abs=EXACT)
    assert np.abs(law - truth).max() > 1e-4
    assert power_against(law, truth, NUMBER) >= POWER
    counts = np.random.default_rng(0).multinomial(NUMBER, law)
    assert p_value(counts, truth) < ALPHA


@pytest.mark.parametrize("name", ["filters on the draft side only", "block: filters on the draft side only"])
def test_with_filters_on_both_sides_the_law_is_right(name: str) -> None:
    mutant: Mutant = MUTANTS[name]
    law, _ = emitted_law(mutant.verifier, mutant.truth, mutant.draft, VOCAB, K)
    assert np.abs(law - target_law(mutant.truth, VOCAB, K + 1)).max() < EXACT


def test_acceptance_on_equality_lets_an_impossible_token_through_which_only_enumeration_sees() -> None:
    target, draft = always(0.0, 0.5, 0.5), always(0.5, 0.25, 0.25)
    truth = target_law(target, 3, 2)
    law, _ = emitted_law(accepts_on_equality(24), target, draft, 3, 1)
    assert law[0].sum() == pytest.approx(0.5 * 2.0**-24, rel=1e-6)
    assert np.abs(law - truth).max() > EXACT
    assert power_against(law.ravel(), truth.ravel(), NUMBER) < 0.01


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh noise", "the draft's noise"])
@pytest.mark.case("V 47386")
def test_noise_of_the_draft_must_not_be_reused_in_a_ratio_test(fresh: bool, family: Family) -> None:
    target, draft = random_laws(1, 4)(()), random_laws(2, 4)(())
    seeds = seed_range(NUMBER, 5)
    noise = uniforms_of(seeds, 0, range(4))
    drafted = winners(noise, draft)
    everyone = np.arange(NUMBER)
    chances = uniforms_of(seeds ^ np.uint64(mix_seed(1, 1)), 0, range(4)) if fresh else noise
    accepted = chances[everyone, drafted] < (target / draft)[drafted]
    # The residual is drawn with noise of its own in both, so that the ratio test alone differs.
    recovered = winners(uniforms_of(seeds, 1, range(4)), np.maximum(target - draft, 0.0))
    counts = np.bincount(np.where(accepted, drafted, recovered), minlength=4)
    if fresh:
        family.follows("rejection sampling with fresh noise", counts, target)
    else:
        assert p_value(counts, target) < ALPHA
