"""The best entries of a long row, without sorting it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 64


def best_indices(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Indices, ascending, of the ``count`` greatest of ``scores`` [n] and of all that equal the last of them.

    ``1 <= count``; all indices if there are no more than ``count``. No NaN.
    """
    if count >= len(scores):
        return np.arange(len(scores))
    # The count-th greatest chunk maximum is itself one of the scores, with count - 1 others at least as great: the
    # count-th greatest score is not below it. That leaves few to look at, whatever the row's length.
    chunks = len(scores) // _CHUNK
    if chunks > count:
        peaks = scores[: chunks * _CHUNK].reshape(chunks, _CHUNK).max(axis=1)
        some: NDArray[np.int64] = np.flatnonzero(scores >= _greatest(peaks, count))
        few = scores[some]
        some = some[few >= _greatest(few, count)]
        return some
    return np.flatnonzero(scores >= _greatest(scores, count))


def _greatest(scores: NDArray[np.floating[Any]], count: int) -> Any:
    """The ``count``-th greatest score."""
    return np.partition(scores, len(scores) - count)[len(scores) - count]
