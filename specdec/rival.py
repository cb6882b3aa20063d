"""By how much a token won: how far the logits would have to be off for another one, its rival, to be sampled.

Used where a token is known to have been expected, to tell a near tie (the logits of two computations differ in their
last bits) from a fault.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from specdec.noise import exponentials
from specdec.params import SamplingParams
from specdec.pipeline import Mask, Row, Scores, adjusted_logits, candidates
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

    If ``rival`` would be sampled from a row that differs from this one by at most e everywhere, the gap is at most 2 e
    (to first order in e). ``winner`` is what :func:`specdec.sampling.sample_row` gives for the same arguments.

    Greedy: the difference of the two scores. Else the difference of the two race times' logarithms, times the
    temperature; but ``winner`` also loses by falling out of min_p, top_k or top_p, and a rival that these left out has
    to come in first.
    """
    if not 0 <= rival < len(row):
        return math.inf
    logits = row if state is None else adjusted_logits(row, state.rules, state.history, mask)
    scores = logits.astype(np.float64)
    if scores[rival] == -np.inf:
        return math.inf
    ahead = float(scores[winner] - scores[rival])
    if params.greedy:
        return max(0.0, ahead)
    pair = np.array(sorted((winner, rival)), dtype=np.int64)
    times = dict(zip(pair.tolist(), np.log(exponentials(params.seed, t, pair, len(row))).tolist(), strict=True))
    race = ahead + params.temperature * float(times[rival] - times[winner])
    winner_out, rival_in = _border(scores, params, winner, rival)
    return max(0.0, min(race, winner_out), rival_in)


def _border(scores: Scores, params: SamplingParams, winner: int, rival: int) -> tuple[float, float]:
    """(how far the kept ``winner`` is from being filtered out, how far ``rival`` is from being kept; 0 if it is)."""
    temperature = params.temperature
    kept = candidates(scores, params).token_ids
    floor = float(scores[kept].min())
    rest = np.delete(scores, kept)
    winner_out = float(scores[winner] - rest.max()) if len(rest) else math.inf
    rival_in = 0.0 if rival in kept else floor - float(scores[rival])
    if params.min_p > 0.0:
        cut = float(scores.max()) + temperature * math.log(params.min_p)
        winner_out = min(winner_out, float(scores[winner]) - cut)
        if scores[rival] < cut:
            rival_in = cut - float(scores[rival])
    if params.top_p < 1.0:
        # The nucleus ends where its mass reaches top_p: a mass m moves by 2 m (1 - m) for each temperature's worth.
        survivors = candidates(scores, replace(params, top_p=1.0)).token_ids
        total = float(np.exp((scores[survivors] - scores.max()) / temperature).sum())
        weights = np.exp((scores[kept] - scores.max()) / temperature) / total
        scale = temperature / (2.0 * params.top_p * (1.0 - params.top_p))
        if scores[winner] == floor:
            winner_out = min(winner_out, (params.top_p - float(weights.sum() - weights.min())) * scale)
        outside = np.setdiff1d(survivors, kept)
        if rival in outside and scores[rival] == scores[outside].max():
            rival_in = min(rival_in, (float(weights.sum()) - params.top_p) * scale)
    return winner_out, max(0.0, rival_in)
