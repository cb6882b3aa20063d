"""Keyed noise: published vectors, and that a number depends on its key alone."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.noise import exponentials, mix_seed, uniforms, uniforms_of_all
from specdec.philox import philox4x32

# Random123's known answers for philox4x32 with 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array(word, dtype=np.uint64) for word in counter)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), key)) == expected


def test_uniforms_follow_the_documented_layout() -> None:
    seed, t, token = 0x0123456789ABCDEF, (5 << 32) | 7, 1234567
    counter = tuple(np.array(word, dtype=np.uint64) for word in (token >> 1, 7, 5, 0x7D1))
    words = [int(w) for w in philox4x32(counter, (0x89ABCDEF, 0x01234567))]  # type: ignore[arg-type]
    for id_, low, high in ((token - 1, words[0], words[1]), (token, words[2], words[3])):
        expected = ((((high << 32) | low) >> 11) + 0.5) * 2.0**-53
        assert uniforms(seed, t, np.array([id_]))[0] == expected


def test_the_noise_of_an_id_does_not_depend_on_who_else_asks() -> None:
    everyone = uniforms_of_all(99, 3, 1001)
    assert len(everyone) == 1001
    ids = np.random.default_rng(0).permutation(1001)
    assert np.array_equal(uniforms(99, 3, ids), everyone[ids])
    for some in (np.array([1000]), np.arange(0, 1001, 3), np.arange(1, 1001), np.arange(1001)):
        assert np.array_equal(exponentials(99, 3, some, 1001), -np.log(everyone[some]))


def test_uniforms_lie_strictly_between_0_and_1_and_use_53_bits() -> None:
    unit = uniforms_of_all(1, 0, 1 << 16)
    assert unit.min() > 0.0
    assert unit.max() < 1.0
    assert len(np.unique(unit)) == len(unit)
    # A 32-bit generator would leave the low bits empty.
    assert np.count_nonzero((unit * 2.0**53).astype(np.uint64) & np.uint64(0xFFFF)) > 0.99 * len(unit)
    assert abs(unit.mean() - 0.5) < 0.005


def test_the_largest_words_give_a_positive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = np.full(1, 0xFFFFFFFF, dtype=np.uint64)
    monkeypatch.setattr("specdec.noise.philox4x32", lambda counter, key: (ones, ones, ones, ones))
    assert exponentials(1, 0, np.array([4]), 100)[0] > 0.0


@pytest.mark.parametrize("other", [(8, 5), (7, 6), (7, 5 + (1 << 32)), (7 + (1 << 32), 5)])
def test_another_seed_or_output_index_gives_other_noise(other: tuple[int, int]) -> None:
    assert not np.any(uniforms_of_all(7, 5, 64) == uniforms_of_all(*other, 64))


def test_choice_0_keeps_the_seed_and_the_others_get_their_own() -> None:
    for seed in (0, 1, 2**53, 2**64 - 1):
        assert mix_seed(seed, 0) == seed
    seeds = {mix_seed(seed, j) for seed in range(50) for j in range(50)}
    assert len(seeds) == 50 * 50
    assert all(0 <= seed < 1 << 64 for seed in seeds)
    assert mix_seed(-1, 0) == 2**64 - 1


@pytest.mark.parametrize(("seed", "t"), [(-1, 0), (1 << 64, 0), (0, -1)])
def test_a_key_out_of_range_is_refused_with_its_value(seed: int, t: int) -> None:
    with pytest.raises(ValueError, match=str(min(seed, t) if seed < 1 << 64 else seed)):
        uniforms(seed, t, np.array([0]))
    with pytest.raises(ValueError, match="-3"):
        mix_seed(1, -3)
