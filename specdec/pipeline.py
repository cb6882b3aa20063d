"""The processed distribution of one row: logits, parameters and history in, candidates out.

The order is a contract: masks (allowed ids, a constraint's, bad words, min_tokens), logit_bias, repetition, frequency
and presence penalties, temperature, min_p, top_k, top_p. Everything is computed for one row at a time, in float64
and in one fixed order of operations, so a row's result cannot depend on the rows beside it. Logits stay float32: what
a bias or the penalties make of one is rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.errors import InvalidLogits, NoTokenLeft, SamplingError
from specdec.history import History
from specdec.params import SamplingParams
from specdec.selection import best_indices

Row = NDArray[np.float32]  # [V] raw logits
Ids = NDArray[np.int64]
Scores = NDArray[np.float64]
Mask = NDArray[np.bool_]  # [V], True where a token is allowed

_NUCLEUS_START = 256  # candidates sorted at first for top_p; eightfold while they do not hold enough mass


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the pipeline left: token ``token_ids[i]`` has weight ``exp(scores[i])``; the best score is 0."""

    token_ids: Ids  # [n] ascending, n >= 1
    scores: Scores  # [n]

    def probabilities(self) -> Scores:
        """``[n]``, summing to 1."""
        weights: Scores = np.exp(self.scores)
        weights /= weights.sum()
        return weights


class SamplingRules:
    """One sequence's parameters, turned into arrays once. Immutable.

    Raises SamplingError if an allowed or biased id lies outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
        bias = dict(params.logit_bias)
        self.bias_ids = _ids(bias)
        self.bias_values = np.array(list(bias.values()), dtype=np.float64)
        for name, ids in (("allowed_token_ids", self.allowed), ("logit_bias", self.bias_ids)):
            if ids is not None and len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise SamplingError(f"{name} holds an id outside of [0, {vocab_size}): {ids.min()} .. {ids.max()}")
        # Ids beyond the vocabulary can neither be sampled nor need a mask.
        self.stop_ids = _ids(sorted(t for t in params.stop_token_ids if 0 <= t < vocab_size))
        words = [word for word in params.bad_words if word and 0 <= word[-1] < vocab_size]
        self.bad_tokens = _ids(word[0] for word in words if len(word) == 1)
        self.bad_runs = tuple((word[:-1], word[-1]) for word in words if len(word) > 1)


def _ids(values: object) -> Ids:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]


def adjusted_logits(row: Row, rules: SamplingRules, history: History, mask: Mask | None = None) -> Row:
    """Logits after masks, bias and penalties: ``[V]`` float32, -inf where a token is forbidden.

    Raises InvalidLogits for NaN or +inf in ``row`` or nothing but -inf, and NoTokenLeft if nothing remains.
    """
    params = rules.params
    scores = row.copy()
    check_peak(float(scores.max()))
    if rules.allowed is not None:
        everything = scores
        scores = np.full_like(everything, -np.inf)
        scores[rules.allowed] = everything[rules.allowed]
    if mask is not None:
        scores[~mask] = -np.inf
    if len(rules.bad_tokens):
        scores[rules.bad_tokens] = -np.inf
    for before, last in rules.bad_runs:
        if len(history.tokens) >= len(before) and tuple(history.tokens[-len(before) :]) == before:
            scores[last] = -np.inf
    if history.num_output_tokens < params.min_tokens:
        scores[rules.stop_ids] = -np.inf
    if len(rules.bias_ids):
        scores[rules.bias_ids] += rules.bias_values  # in float64, rounded once
    if params.has_penalties:
        _penalise(scores, params, history)
    peak = float(scores.max())
    if peak == -math.inf:
        check_some_finite(row)
        raise NoTokenLeft(_nothing_left(rules, history, mask))
    if not math.isfinite(peak):
        raise SamplingError(f"the penalties overflow a logit (repetition_penalty {params.repetition_penalty})")
    return scores


def check_peak(peak: float) -> None:
    """Raise InvalidLogits if a row's greatest logit shows that the row holds NaN or +inf."""
    if math.isnan(peak) or peak == math.inf:
        raise InvalidLogits(f"the model returned a logit of {peak}")


def check_some_finite(row: Row) -> None:
    """Raise InvalidLogits if the model itself leaves nothing to choose from."""
    if float(row.max()) == -math.inf:
        raise InvalidLogits("no token is left to choose from: all of the model's logits are -inf")


@np.errstate(over="ignore")  # the caller looks at the result
def _penalise(scores: Row, params: SamplingParams, history: History) -> None:
    ids, counts = history.seen_ids, history.output_counts
    seen = scores[ids].astype(np.float64)
    if params.repetition_penalty != 1.0:
        seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if params.frequency_penalty != 0.0:
        seen -= params.frequency_penalty * counts
    if params.presence_penalty != 0.0:
        seen -= params.presence_penalty * (counts > 0)
    scores[ids] = seen


def _nothing_left(rules: SamplingRules, history: History, mask: Mask | None) -> str:
    params = rules.params
    causes = []
    if params.allowed_token_ids is not None:
        causes.append(f"allowed_token_ids ({len(params.allowed_token_ids)} ids)")
    if mask is not None:
        causes.append("the structured-output constraint")
    if params.bad_words:
        causes.append(f"bad_words ({len(params.bad_words)})")
    if history.num_output_tokens < params.min_tokens:
        causes.append(f"min_tokens ({params.min_tokens}, which forbids the stop tokens)")
    why = " together with ".join(causes)
    return f"no token is left to choose from at output position {history.num_output_tokens}: {why}"


def candidates(logits: Row | Scores, params: SamplingParams) -> Candidates:
    """Temperature (above 0), min_p, top_k and top_p, in this order. At least one token remains."""
    adjusted = logits.astype(np.float64)
    # Relative to the best: dividing by a tiny temperature then overflows to -inf, never to NaN.
    with np.errstate(over="ignore"):
        scores = (adjusted - adjusted.max()) / params.temperature
    alive = scores >= math.log(params.min_p) if params.min_p > 0.0 else scores > -np.inf
    num_alive = int(np.count_nonzero(alive))
    if 0 < params.top_k < num_alive:
        kept = _top_k(scores, params.top_k)  # all of them alive: whoever is better than an alive token is
        scores = scores[kept]
    elif num_alive < len(scores):
        kept = np.flatnonzero(alive)
        scores = scores[kept]
    else:
        kept = np.arange(len(scores))
    if params.top_p < 1.0:
        chosen = _top_p(scores, params.top_p)
        kept, scores = kept[chosen], scores[chosen]
    return Candidates(kept, scores)


def _top_k(scores: Scores, k: int) -> Ids:
    """Indices, ascending, of the k best; among equals at the border the lowest ids win."""
    best = best_indices(scores, k)
    if len(best) > k:
        best = np.sort(best[np.argsort(-scores[best], kind="stable")[:k]])
    return best


def _top_p(scores: Scores, top_p: float) -> Ids:
    """Indices, ascending, of the smallest set of best tokens that holds ``top_p`` of the mass; equals by lowest id."""
    weights = np.exp(scores)
    wanted = top_p * float(weights.sum())
    size = _NUCLEUS_START
    while True:
        best = best_indices(scores, size)
        best = best[np.argsort(-scores[best], kind="stable")]
        mass = np.cumsum(weights[best])  # sequential: a longer list begins with the same sums
        if mass[-1] >= wanted or len(best) == len(scores):
            return np.sort(best[: int(np.searchsorted(mass, wanted)) + 1])
        size *= 8
