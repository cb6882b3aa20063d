"""Pairs of places whose noise must be independent, and statistics of them: what a bad key would show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.noise import mix_seed
from tests.specdec.gtest import normal_p_value, p_value
from tests.specdec.keyed import Floats, Seeds, seed_range, uniforms_of

NUMBER = 2**16  # pairs
BINS = 4  # of each side: tables of 16 cells

Uniforms = Callable[[Seeds, int, list[int]], Floats]  # seeds [n], t, ids -> [n, ids]
Mix = Callable[[int, int], int]


@dataclass(frozen=True)
class Place:
    """Where the noise of one side comes from: the seed is ``mix(base + shift, choice)``."""

    shift: int = 0
    choice: int = 0
    t: int = 0
    token: int = 0


@dataclass(frozen=True)
class Pair:
    """Two places for ``NUMBER`` base seeds, every second one from ``start`` on: no noise is used twice."""

    first: Place
    second: Place
    start: int = 0


PAIRS = {
    "seeds s, s + 1 from 0 on": Pair(Place(), Place(shift=1)),
    "seeds s, s + 1 around 2^32": Pair(Place(), Place(shift=1), 2**32 - NUMBER),
    "seeds s, s + 1 around 2^63": Pair(Place(), Place(shift=1), 2**63 - NUMBER),
    "seeds s, s + 1 around 2^64": Pair(Place(), Place(shift=1), 2**64 - NUMBER),
    "seeds s, s + 2^32": Pair(Place(), Place(shift=2**32)),
    "seeds s, s + 2^63": Pair(Place(), Place(shift=2**63)),
    "positions 0, 1": Pair(Place(), Place(t=1)),
    "positions 1000, 1001": Pair(Place(t=1000), Place(t=1001)),
    "positions around 2^32": Pair(Place(t=2**32 - 1), Place(t=2**32)),
    "seed s at position 1, seed s + 1 at position 0": Pair(Place(t=1), Place(shift=1)),
    "choices 0, 1": Pair(Place(), Place(choice=1)),
    "choices 1, 2": Pair(Place(choice=1), Place(choice=2)),
    "choice 1 of s and of s + 1": Pair(Place(choice=1), Place(shift=1, choice=1)),
    "choice 1 of s, choice 0 of s + 1": Pair(Place(choice=1), Place(shift=1)),
    "lanes of one counter": Pair(Place(token=6), Place(token=7)),
    "lanes of neighbouring counters": Pair(Place(token=7), Place(token=8)),
    "tokens 2^16 apart": Pair(Place(token=3), Place(token=3 + 2**16)),
    "token 2 at position 0, token 0 at position 1": Pair(Place(token=2), Place(t=1)),
}


def pair_p_values(pair: Pair, uniforms: Uniforms = uniforms_of, mix: Mix = mix_seed) -> Iterator[tuple[str, float]]:
    """A G-test of the table of (U, U') and a test of their correlation."""
    u, v = (_noise(pair.start, place, uniforms, mix) for place in (pair.first, pair.second))
    cells = (u * BINS).astype(np.int64) * BINS + (v * BINS).astype(np.int64)
    yield "table", p_value(np.bincount(cells, minlength=BINS**2), np.full(BINS**2, 1.0 / BINS**2))
    products = 12.0 * (u - 0.5) * (v - 0.5)  # mean 0 and variance 1 if independent
    yield "correlation", normal_p_value(float(products.sum()) / NUMBER**0.5)


def _noise(start: int, place: Place, uniforms: Uniforms, mix: Mix) -> Floats:
    seeds = seed_range(2 * NUMBER, start + place.shift)[::2]
    if place.choice:
        seeds = np.array([mix(seed, place.choice) for seed in seeds.tolist()], dtype=np.uint64)
    return uniforms(seeds, place.t, [place.token])[:, 0]


SHIFTS = (0, 12, 24, 32, 45)  # the 4 bits of U behind so many


def bit_p_values(uniforms: Uniforms = uniforms_of) -> Iterator[tuple[str, float]]:
    """Whether the bits of U behind each of ``SHIFTS`` are uniform: a U of fewer bits has nothing there."""
    u = uniforms(seed_range(NUMBER), 0, [0])[:, 0]
    for shift in SHIFTS:
        bits: NDArray[np.int64] = (u * 2.0 ** (shift + 4)).astype(np.int64) % 16
        yield f"bits behind {shift}", p_value(np.bincount(bits, minlength=16), np.full(16, 1.0 / 16.0))
