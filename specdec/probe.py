"""The probe at load, second part: sampling and logprobs of a row do not depend on the rows beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from model.exactness import ExactnessCheck, ExactnessReport
from specdec.params import SamplingParams
from specdec.sampling import RowJob, Sampler

if TYPE_CHECKING:
    from model.loader import LoadedModel

_ROWS = 9  # a draft length of 8, verified
_PARAMS = (
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2**63 + 5, temperature=1.0),
    SamplingParams(seed=3, temperature=0.7, min_p=0.02),
    SamplingParams(seed=4, temperature=0.9, top_p=0.95),
    SamplingParams(seed=5, temperature=1.2, top_k=50),
)
_TOGETHER = (_ROWS * len(_PARAMS), 2, 3, 5, 8, 16)  # rows that come together; the later ones from row 1 on


def measured_exactness(loaded: LoadedModel, sampler: Sampler) -> ExactnessReport:
    """The level of ``loaded`` with ``sampler``: what was found when it was loaded, and :func:`probe_sampling`."""
    return loaded.exactness.with_checks(probe_sampling(sampler, loaded.info.num_token_ids))


def probe_sampling(sampler: Sampler, vocab_size: int) -> tuple[ExactnessCheck, ...]:
    """Compare ``sampler`` on rows ``[R, vocab_size]`` together with the same rows alone. Takes some milliseconds."""
    rng = np.random.default_rng(20)
    logits = torch.from_numpy(4.0 * rng.standard_normal((_ROWS * len(_PARAMS), vocab_size), dtype=np.float32))
    checks = [_check_normalisers(sampler, logits)]
    jobs = [RowJob(i * _ROWS, _ROWS, params, 5) for i, params in enumerate(_PARAMS) if sampler.batchable(params)]
    checks.insert(0, _check_tokens(sampler, logits, jobs))
    return tuple(checks)


def _check_tokens(sampler: Sampler, logits: Tensor, jobs: list[RowJob]) -> ExactnessCheck:
    if not jobs:
        return ExactnessCheck("sampling", True, "rows are sampled one by one")
    params = {job.first_row + i: (job.params, job.t + i) for job in jobs for i in range(job.count)}

    def sample(first: int, count: int) -> list[float]:
        rows = range(first, first + count)
        single = [RowJob(row - first, 1, *params[row]) for row in rows if row in params]
        tokens = sampler.sample_batch(logits[first : first + count], single)
        return [tokens.get(row - first, -2) for row in rows]

    def alone(row: int) -> float:
        return sampler.sample_batch(_alone(logits, row), [RowJob(0, 1, *params[row])])[0] if row in params else -2

    return _compare("sampling", "tokens", len(logits), sample, alone)


def _check_normalisers(sampler: Sampler, logits: Tensor) -> ExactnessCheck:
    def alone(row: int) -> float:
        return sampler.normalisers(_alone(logits, row), 0, 1)[0]

    return _compare("logprobs", "normalisers", len(logits), lambda f, c: sampler.normalisers(logits, f, c), alone)


def _compare(
    name: str, what: str, rows: int, together: Callable[[int, int], list[float]], alone: Callable[[int], float]
) -> ExactnessCheck:
    """``together(first row, count)`` against ``alone(row)``, for each count of rows that may come together."""
    expected = [alone(row) for row in range(rows)]
    compared = 0
    for count in _TOGETHER:
        first = 0 if count == rows else 1
        found = together(first, count)
        odd = [row for row in range(count) if found[row] != expected[first + row]]
        compared += count
        if odd:
            largest = max(abs(found[row] - expected[first + row]) for row in odd)
            size = f", by up to {largest:.3g}" if name == "logprobs" else ""
            detail = f"{len(odd)} {what} of {count} rows differ from those of the rows alone, the first of row {odd[0]}"
            return ExactnessCheck(name, False, detail + size)
    return ExactnessCheck(name, True, f"{compared} {what} compared, up to {max(_TOGETHER)} rows together")


def _alone(logits: Tensor, row: int) -> Tensor:
    """``[1, V]``, in memory of its own."""
    return logits[row : row + 1].clone()
