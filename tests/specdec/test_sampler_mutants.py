"""Faults of a keyed sampler: each is caught by the tests of the law or of independence, at their sample sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from specdec.noise import mix_seed
from tests.specdec.gtest import ALPHA, p_value
from tests.specdec.keyed import Floats, Seeds, count_paths, keyed_paths, path_law, seed_range, uniforms_of
from tests.specdec.law_cases import BASE, DEPTH, PROMPT, TARGET, VOCAB
from tests.specdec.laws import naive_law
from tests.specdec.noise_pairs import PAIRS, Mix, Uniforms, bit_p_values, pair_p_values
from tests.specdec.test_law import NUMBER

Race = Callable[[Floats, Floats], Floats]  # U [n, V], p [V] -> winners [n]


def noise_of_24_bits(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return (np.floor(uniforms_of(seeds, t, ids) * 2.0**24) + 0.5) * 2.0**-24


def noise_of_32_bits(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return (np.floor(uniforms_of(seeds, t, ids) * 2.0**32) + 0.5) * 2.0**-32


def same_noise_at_every_position(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return uniforms_of(seeds, 0, ids)


def same_noise_for_every_token(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return np.repeat(uniforms_of(seeds, t, [0]), len(ids), axis=1)


def same_noise_for_two_tokens(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return uniforms_of(seeds, t, [id_ & ~1 for id_ in ids])


def seed_cut_to_32_bits(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return uniforms_of(seeds & np.uint64(2**32 - 1), t, ids)


def seed_held_in_a_float(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return uniforms_of(seeds.astype(np.float64).astype(np.uint64), t, ids)


def seed_plus_position(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return uniforms_of(seeds + np.uint64(t), 0, ids)


def position_saturates(seeds: Seeds, t: int, ids: list[int]) -> Floats:
    return uniforms_of(seeds, min(t, 2**32 - 1), ids)


def choice_added_to_the_seed(seed: int, choice: int) -> int:
    return (seed + choice) % 2**64


def choice_xored_into_the_seed(seed: int, choice: int) -> int:
    return seed ^ choice


@dataclass(frozen=True)
class KeyMutant:
    caught_by: str  # a pair, or "bits"
    uniforms: Uniforms = uniforms_of
    mix: Mix = mix_seed


KEY_MUTANTS = {
    "U of 24 bits": KeyMutant("bits", noise_of_24_bits),
    "U of 32 bits": KeyMutant("bits", noise_of_32_bits),
    "the same noise at every position": KeyMutant("positions 0, 1", same_noise_at_every_position),
    "the same noise for every token": KeyMutant("lanes of neighbouring counters", same_noise_for_every_token),
    "the same noise for two neighbouring tokens": KeyMutant("lanes of one counter", same_noise_for_two_tokens),
    "the seed cut to 32 bits": KeyMutant("seeds s, s + 2^32", seed_cut_to_32_bits),
    "the seed held in a float": KeyMutant("seeds s, s + 1 around 2^63", seed_held_in_a_float),
    "seed and position added": KeyMutant("seed s at position 1, seed s + 1 at position 0", seed_plus_position),
    "the position saturates": KeyMutant("positions around 2^32", position_saturates),
    "choice added to the seed": KeyMutant("choice 1 of s, choice 0 of s + 1", mix=choice_added_to_the_seed),
    "choice xored into the seed": KeyMutant("choice 1 of s, choice 0 of s + 1", mix=choice_xored_into_the_seed),
}


@pytest.mark.parametrize("name", KEY_MUTANTS)
def test_a_fault_of_the_key_is_caught(name: str) -> None:
    mutant = KEY_MUTANTS[name]
    if mutant.caught_by == "bits":
        found = dict(bit_p_values(mutant.uniforms))
    else:
        found = dict(pair_p_values(PAIRS[mutant.caught_by], mutant.uniforms, mutant.mix))
    assert min(found.values()) < ALPHA


def paths_p_value(uniforms: Floats) -> float:
    paths = keyed_paths(TARGET.logits_of, BASE, PROMPT, uniforms)
    return p_value(*count_paths(paths, path_law(TARGET.logits_of, BASE, PROMPT, DEPTH)))


@pytest.mark.parametrize(
    "mutant", [same_noise_at_every_position, same_noise_for_every_token, same_noise_for_two_tokens]
)
def test_paths_under_shared_noise_leave_the_joint_law(mutant: Uniforms) -> None:
    ids = list(range(VOCAB))
    assert paths_p_value(np.stack([mutant(seed_range(NUMBER), t, ids) for t in range(DEPTH)], axis=1)) < ALPHA


def test_only_the_joint_law_sees_noise_that_repeats_at_every_position() -> None:
    uniforms = same_noise_at_every_position(seed_range(NUMBER), 0, list(range(VOCAB)))
    first = keyed_paths(TARGET.logits_of, BASE, PROMPT, uniforms[:, None])[:, 0]
    law = naive_law(TARGET.logits_of(PROMPT).tolist(), BASE, PROMPT, len(PROMPT))
    assert p_value(np.bincount(first, minlength=VOCAB), law) > 0.001


WRONG_RACES: dict[str, Race] = {
    "argmax of p U": lambda u, p: (p * u).argmax(axis=1),
    "argmin of U / p": lambda u, p: (u / p).argmin(axis=1),
    "argmin of E / log p": lambda u, p: (np.log(u) / np.log(p)).argmin(axis=1),
    "argmax of p E": lambda u, p: (-p * np.log(u)).argmax(axis=1),
    "Gumbel noise with one logarithm": lambda u, p: (np.log(p) - np.log(u)).argmax(axis=1),
    "noise twice as hot": lambda u, p: (-np.log(u) / p**0.5).argmin(axis=1),
}


@pytest.mark.parametrize("name", WRONG_RACES)
def test_a_wrong_race_leaves_the_law(name: str) -> None:
    law = np.array(naive_law(TARGET.logits_of(PROMPT).tolist(), BASE, PROMPT, len(PROMPT)))
    found = WRONG_RACES[name](uniforms_of(seed_range(NUMBER), 0, list(range(VOCAB))), law)
    assert p_value(np.bincount(found, minlength=VOCAB), law) < ALPHA
