"""Keyed sampling: the token of a row is a function of (row, parameters, history, seed, output index) and nothing else.

Temperature 0 takes the greatest logit, the lowest id on an exact tie. Otherwise an exponential race decides:
``argmin over v of E_v / p_v`` with E_v keyed by (seed, t, v), which has the law of the processed distribution p.
Drafts are never looked at, so they cannot change a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.errors import InvalidLogits
from specdec.history import History
from specdec.logprobs import check_normaliser, logsumexp
from specdec.noise import exponentials
from specdec.params import SamplingParams
from specdec.pipeline import Candidates, Mask, Row, SamplingRules, adjusted_logits, candidates, check_peak


class Kernels(Protocol):
    """Row operations that compiled kernels may offer (model.kernels). Each row's result depends on that row alone.

    A row that has no valid result (NaN, +inf, nothing but -inf) gives -1, or NaN for the normaliser.
    """

    def argmax_rows(self, logits: Tensor) -> Tensor:
        """``[R, V]`` float32 -> ``[R]`` int64: the lowest id among the greatest logits."""

    def logsumexp_rows(self, logits: Tensor) -> Tensor:
        """``[R, V]`` float32 -> ``[R]`` float64."""

    def keyed_sample_rows(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        steps: Tensor,
        *,
        min_p: Tensor | None = None,
        top_k: Tensor | None = None,
        top_p: Tensor | None = None,
    ) -> Tensor:
        """``[R, V]`` float32 -> ``[R]`` int64: the race after temperature, min_p, top_k and top_p.

        All ``[R]``: temperatures float64 above 0, seeds int64 (the 64-bit pattern), steps int64 (output indices),
        min_p float64 (0: off), top_k int64 (0: off), top_p float64 (1: off).
        """


class SamplingState:
    """What a sequence that is not plain needs beyond its row. Derived from its tokens; may be rebuilt at any time."""

    __slots__ = ("history", "rules")

    def __init__(self, params: SamplingParams, tokens: Seq[int], num_prompt_tokens: int, vocab_size: int) -> None:
        self.rules = SamplingRules(params, vocab_size)
        self.history = History(tokens, num_prompt_tokens)


def sample_row(
    row: Row, params: SamplingParams, t: int, state: SamplingState | None = None, mask: Mask | None = None
) -> int:
    """The token at output index ``t`` given the raw logits ``row`` [V]; ``state`` is None for plain parameters.

    The history in ``state`` ends just before this token. Where ``mask`` leaves one token, the row is not looked at.
    Raises SamplingError.
    """
    if state is not None:
        sole = _sole_token(params, t, mask)
        if sole is not None:
            return sole
        row = adjusted_logits(row, state.rules, state.history, mask)
        if params.greedy:
            return int(row.argmax())
    elif params.greedy:
        return _argmax(row)
    else:
        _check_row(float(row.max()))
    return race(candidates(row, params), params.seed, t, len(row))


def sample_token(row: Row, params: SamplingParams, tokens: Seq[int], num_prompt_tokens: int) -> int:
    """The token that follows ``tokens``, from first principles: nothing is kept between calls. Raises SamplingError."""
    state = SamplingState(params, tokens, num_prompt_tokens, len(row))
    return sample_row(row, params, len(tokens) - num_prompt_tokens, state)


def race(runners: Candidates, seed: int, t: int, vocab_size: int) -> int:
    """The winner of the exponential race; the lowest id on an exact tie."""
    times = exponentials(seed, t, runners.token_ids, vocab_size)
    with np.errstate(over="ignore"):  # an unlikely token's time may be infinite: it loses
        times *= np.exp(-runners.scores)
    return int(runners.token_ids[times.argmin()])


def _sole_token(params: SamplingParams, t: int, mask: Mask | None) -> int | None:
    """The only token that ``mask`` allows, unless it has several or another mask may forbid it."""
    if mask is None or params.allowed_token_ids is not None or params.bad_words or t < params.min_tokens:
        return None
    return int(mask.argmax()) if np.count_nonzero(mask) == 1 else None


def _argmax(row: Row) -> int:
    token = int(row.argmax())  # numpy: the first of equals, or the first NaN
    _check_row(float(row[token]))
    return token


def _check_row(peak: float) -> None:
    check_peak(peak)
    if peak == -math.inf:
        raise InvalidLogits("no token is left to choose from: all of the model's logits are -inf")


@dataclass(frozen=True, slots=True)
class RowJob:
    """A plain sequence's rows ``first_row ..< first_row + count``, for output indices from ``t`` on."""

    first_row: int
    count: int
    params: SamplingParams
    t: int


class Sampler:
    """Samples rows with compiled kernels, many at once where it can. A sequence's path depends on its parameters only.

    ``kernels`` is None to use numpy throughout.
    """

    def __init__(self, kernels: Kernels | None = None) -> None:
        self._kernels = kernels

    def batchable(self, params: SamplingParams) -> bool:
        """True if :meth:`sample_batch` takes this sequence's rows, those behind a rejection too."""
        return self._kernels is not None and params.plain

    def sample_batch(self, logits: Tensor, jobs: Seq[RowJob]) -> dict[int, int]:
        """Token by row for all rows of ``jobs`` (batchable, ascending). ``logits``: ``[R, V]`` float32.

        A row without a valid result gets -1: :func:`sample_row` on it raises the error in words.
        """
        tokens: dict[int, int] = {}
        if self._kernels is None or not jobs:
            return tokens
        greedy = [row for job in jobs if job.params.greedy for row in range(job.first_row, job.first_row + job.count)]
        if greedy:
            found = self._kernels.argmax_rows(_select(logits, greedy))
            tokens.update(zip(greedy, found.tolist(), strict=True))
        drawn = [job for job in jobs if not job.params.greedy]
        if drawn:
            rows = [row for job in drawn for row in range(job.first_row, job.first_row + job.count)]
            found = self._kernels.keyed_sample_rows(
                _select(logits, rows),
                _spread([job.params.temperature for job in drawn], drawn, np.float64),
                _spread([job.params.seed for job in drawn], drawn, np.uint64),
                torch.tensor([job.t + i for job in drawn for i in range(job.count)]),
                min_p=_spread([job.params.min_p for job in drawn], drawn, np.float64),
                top_k=_spread([job.params.top_k for job in drawn], drawn, np.int64),
                top_p=_spread([job.params.top_p for job in drawn], drawn, np.float64),
            )
            tokens.update(zip(rows, found.tolist(), strict=True))
        return tokens

    def sample_row(
        self, row: Row, params: SamplingParams, t: int, state: SamplingState | None = None, mask: Mask | None = None
    ) -> int:
        """:func:`sample_row`, with the kernels behind masks, bias and penalties. Raises SamplingError."""
        if self._kernels is None or state is None or params.greedy or _sole_token(params, t, mask) is not None:
            return sample_row(row, params, t, state, mask)
        logits = torch.from_numpy(adjusted_logits(row, state.rules, state.history, mask))
        return self.sample_batch(logits[None], [RowJob(0, 1, params, t)])[0]

    def normalisers(self, logits: Tensor, first_row: int, count: int) -> list[float]:
        """logsumexp of ``count`` rows of ``logits`` [R, V]. Raises InvalidLogits if one of them has none."""
        rows = logits[first_row : first_row + count]
        if self._kernels is None:
            return [logsumexp(row) for row in rows.numpy()]
        values: list[float] = self._kernels.logsumexp_rows(rows).tolist()
        for value in values:
            check_normaliser(value)
        return values


def _select(logits: Tensor, rows: list[int]) -> Tensor:
    if len(rows) == logits.shape[0]:
        return logits
    return logits.index_select(0, torch.tensor(rows))


def _spread(values: Seq[float], jobs: Seq[RowJob], dtype: type[np.generic]) -> Tensor:
    """One value a job -> one value a row; unsigned 64-bit values keep their pattern."""
    rows = np.repeat(np.array(values, dtype=dtype), [job.count for job in jobs])
    return torch.from_numpy(rows.view(np.int64) if dtype is np.uint64 else rows)
