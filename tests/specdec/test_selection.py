"""The best entries of a row equal those of a sorted row, ties included."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.selection import best_indices


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 6400])
@pytest.mark.parametrize("levels", [2, 30, 10**6])
def test_best_indices_are_all_that_are_not_worse_than_the_last_wanted(length: int, levels: int) -> None:
    rng = np.random.default_rng(length + levels)
    scores = rng.integers(0, levels, length).astype(np.float32)
    for count in (1, 2, 20, 64, 99, length - 1, length, length + 5):
        if count < 1:
            continue
        border = np.sort(scores)[::-1][min(count, length) - 1]
        expected = np.arange(length) if count >= length else np.flatnonzero(scores >= border)
        assert np.array_equal(best_indices(scores, count), expected)
