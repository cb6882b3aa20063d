"""Logprobs: log_softmax of a row's raw logits in float64, one row at a time in one fixed order.

They do not see the sampling pipeline, and they cannot depend on the batch or on speculation.
"""

from __future__ import annotations

import math

import numpy as np

from specdec.errors import InvalidLogits
from specdec.pipeline import Row
from specdec.plan import TokenLogprobs
from specdec.selection import best_indices


def logsumexp(row: Row) -> float:
    """log of the sum of exp over ``row`` [V]. Raises InvalidLogits for NaN, +inf, or nothing but -inf."""
    scores = row.astype(np.float64)
    peak = float(scores.max())
    check_normaliser(peak)
    scores -= peak
    return peak + math.log(float(np.exp(scores, out=scores).sum()))


def check_normaliser(value: float) -> None:
    """Raise InvalidLogits unless ``value`` can normalise a row."""
    if not math.isfinite(value):
        raise InvalidLogits(f"the model returned logits without a distribution (normaliser {value})")


def token_logprobs(row: Row, token_id: int, top: int, normaliser: float | None = None) -> TokenLogprobs:
    """Logprob and rank of ``token_id`` and the ``top`` best tokens of ``row`` [V].

    Equal logits are ordered by id. ``normaliser`` is the row's logsumexp if the caller has it already.
    """
    if normaliser is None:
        normaliser = logsumexp(row)
    own = row[token_id]
    rank = 1 + int(np.count_nonzero(row > own)) + int(np.count_nonzero(row[:token_id] == own))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(own) - normaliser,
        rank=rank,
        top=tuple((token, float(row[token]) - normaliser) for token in best_tokens(row, top)),
    )


def best_tokens(row: Row, count: int) -> list[int]:
    """The ``count`` best ids of ``row`` [V] (all of them if there are fewer), best first, lowest id first on a tie."""
    if count <= 0:
        return []
    best = best_indices(row, count)
    order = np.argsort(-row[best], kind="stable")[:count]
    return [int(token) for token in best[order]]
