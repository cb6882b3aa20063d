"""Keyed noise: the number that belongs to (seed, output index t, token id), whoever asks and whenever.

One Philox counter serves two neighbouring ids::

    key     (seed low word, seed high word)
    counter (token_id >> 1, t low word, t high word, 0x7D1)
    words   w0 w1 | w2 w3
            even id | odd id        U = ((high << 32 | low) >> 11, + 0.5) * 2**-53, low = w0 or w2

U has all 53 bits a float64 can hold: a coarser U would cap the tail of E = -log U and make ties.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.philox import Words, philox4x32

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_DOMAIN = 0x7D1  # keeps this use of the generator apart from any other
_HALF_STEP = 2.0**-53
_LARGEST_U = 1.0 - 2.0**-53  # adding 0.5 to the largest integer rounds up to U = 1, whose E is 0


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def mix_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of a request: 64 bits unsigned; choice 0 has the request's own seed.

    ``seed`` may be any integer (it is taken modulo 2**64); ``index`` is not negative.
    """
    if index < 0:
        raise ValueError(f"a choice index is not negative, got {index}")
    seed &= _MASK_64
    return seed if index == 0 else _splitmix64(_splitmix64(seed) ^ index)


def _word(value: int) -> Words:
    return np.array(value & 0xFFFFFFFF, dtype=np.uint64)


def _draw(seed: int, t: int, pairs: Words) -> tuple[Words, Words, Words, Words]:
    if not 0 <= seed <= _MASK_64:
        raise ValueError(f"a seed has 64 bits unsigned, got {seed}")
    if t < 0:
        raise ValueError(f"an output index is not negative, got {t}")
    counter = (pairs, _word(t), _word(t >> 32), _word(_DOMAIN))
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))


def _to_unit(low: Words, high: Words) -> NDArray[np.float64]:
    bits = ((high << np.uint64(32)) | low) >> np.uint64(11)
    unit = bits.astype(np.float64)
    unit += 0.5
    unit *= _HALF_STEP
    return np.minimum(unit, _LARGEST_U, out=unit)


def uniforms(seed: int, t: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """U in (0, 1) of each token id, ``[n]`` float64. ``seed``: 64 bits unsigned; ``t``: the output index."""
    ids = np.asarray(token_ids).astype(np.uint64)
    w0, w1, w2, w3 = _draw(seed, t, ids >> np.uint64(1))
    odd = (ids & np.uint64(1)).astype(bool)
    return _to_unit(np.where(odd, w2, w0), np.where(odd, w3, w1))


def uniforms_of_all(seed: int, t: int, vocab_size: int) -> NDArray[np.float64]:
    """``uniforms(seed, t, [0 .. vocab_size - 1])`` with one counter for two ids. ``[vocab_size]`` float64."""
    w0, w1, w2, w3 = _draw(seed, t, np.arange((vocab_size + 1) // 2, dtype=np.uint64))
    unit = np.empty((len(w0), 2), dtype=np.float64)
    unit[:, 0] = _to_unit(w0, w1)
    unit[:, 1] = _to_unit(w2, w3)
    return unit.reshape(-1)[:vocab_size]


def exponentials(seed: int, t: int, token_ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.float64]:
    """E = -log U > 0 of each of ``token_ids`` (within ``vocab_size``), ``[n]`` float64."""
    if len(token_ids) == vocab_size:  # ids are distinct and ascending: this is everyone
        unit = uniforms_of_all(seed, t, vocab_size)
    elif 2 * len(token_ids) > vocab_size:
        unit = uniforms_of_all(seed, t, vocab_size)[token_ids]
    else:
        unit = uniforms(seed, t, token_ids)
    return -np.log(unit)
