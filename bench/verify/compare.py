"""Comparing two completions: ids, logprobs, finish reasons; bit for bit at L0, up to near ties of the logits below."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from bench.offline import Completion
from bench.verify.capture import Row
from specdec.params import SamplingParams
from specdec.rival import rival_gap
from specdec.sampling import SamplingState, sample_row

Kind = Literal["token", "logprob", "length", "finish_reason"]

NEAR_TIE_SHARE = 0.01  # of the compared positions: more near ties than that fail
_FLOAT32_TOLERANCE = 1e-3  # logits
_BFLOAT16_SHARE = 1 / 128  # of the row's greatest logit: about two roundings of a bfloat16


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two completions differ first. ``output_index`` is their common length for kind length."""

    output_index: int
    kind: Kind


def first_difference(expected: Completion, got: Completion, *, logprob_tolerance: float = 0.0) -> Difference | None:
    """None if nothing differs. With a tolerance, logprobs of equal tokens may differ by as much."""
    for i, (a, b) in enumerate(zip(expected.token_ids, got.token_ids, strict=False)):
        if a != b:
            return Difference(i, "token")
        if not _logprobs_agree(expected, got, i, logprob_tolerance):
            return Difference(i, "logprob")
    shorter = min(len(expected.token_ids), len(got.token_ids))
    if len(expected.token_ids) != len(got.token_ids):
        return Difference(shorter, "length")
    if len(expected.logprobs) != len(got.logprobs):
        return Difference(shorter, "logprob")
    if expected.finish_reason != got.finish_reason:
        return Difference(max(0, shorter - 1), "finish_reason")
    return None


def _logprobs_agree(expected: Completion, got: Completion, index: int, tolerance: float) -> bool:
    if index >= len(expected.logprobs) or index >= len(got.logprobs):
        return len(expected.logprobs) == len(got.logprobs)
    a, b = expected.logprobs[index], got.logprobs[index]
    if tolerance <= 0.0:
        return a == b
    pairs = zip([a.logprob, *(x for _, x in a.top)], [b.logprob, *(x for _, x in b.top)], strict=True)
    return all(abs(x - y) <= tolerance for x, y in pairs)


def tie_tolerance(row: Row, dtype: str) -> float:
    """By how much a logit of ``row`` may be off because a sum was rounded in another order."""
    if dtype == "float32":
        return _FLOAT32_TOLERANCE
    return float(np.abs(row[np.isfinite(row)]).max()) * _BFLOAT16_SHARE


def near_tie(row: Row, params: SamplingParams, tokens: list[int], num_prompt: int, other: int, off_by: float) -> bool:
    """Could ``other`` have been chosen after ``tokens`` if each logit of ``row``, the reference's, were off by so much?

    The rule: the two best processed logits nearly tie, or the two tokens finish the race nearly together, or one of
    them stands at the border of min_p, top_k or top_p (specdec.rival).
    """
    state = SamplingState(params, tokens, num_prompt, len(row))
    t = len(tokens) - num_prompt
    return rival_gap(row, params, t, sample_row(row, params, t, state), other, state) <= 2 * off_by
