"""By how much a token won: how far the logits would have to be off for another one, its rival, to be sampled.

Used where a token is known to have been expected, to tell a near tie (the logits of two computations differ in their
last bits) from a fault.
"""

from __future__ import annotations

import math

import numpy as np

from specdec.noise import exponentials
from specdec.params import SamplingParams
from specdec.pipeline import Mask, Row, Scores, adjusted_scores, candidates
from specdec.sampling import SamplingState


def rival_gap(
    row: Row,
    params: SamplingParams,
    t: int,
    winner: int,
    rival: int,
    state: SamplingState | None = None,
    mask: Mask | None = None,
) -> float:
    """At least 0, in units of the logits ``row`` [V]; infinite if ``rival`` is forbidden or no token of the vocabulary.

    ``winner`` is what :func:`specdec.sampling.sample_row` gives for the same arguments. Greedy: the difference of the
    two scores. Else the difference of the two race times' logarithms, times the temperature; but ``winner`` also
    loses by falling out of min_p, top_k or top_p, and a rival that these left out has to come in first.
    """
    if not 0 <= rival < len(row):
        return math.inf
    scores = row.astype(np.float64) if state is None else adjusted_scores(row, state.rules, state.history, mask)
    if scores[rival] == -np.inf:
        return math.inf
    ahead = float(scores[winner] - scores[rival])
    if params.greedy:
        return max(0.0, ahead)
    pair = np.array(sorted((winner, rival)), dtype=np.int64)
    times = dict(zip(pair.tolist(), np.log(exponentials(params.seed, t, pair, len(row))).tolist(), strict=True))
    race = ahead + params.temperature * float(times[rival] - times[winner])
    kept = candidates(scores, params).token_ids
    winner_out = float(scores[winner]) - _best_without(scores, kept)
    rival_in = 0.0 if rival in kept else float(scores[kept].min() - scores[rival])
    return max(0.0, min(race, winner_out), rival_in)


def _best_without(scores: Scores, kept: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """The best score that the filters left out; -inf if they left nothing out."""
    rest = np.delete(scores, kept)
    return float(rest.max()) if len(rest) else -math.inf
