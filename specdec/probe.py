"""The probe at load, second part: sampling and logprobs of a row do not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model.probe import ExactnessCheck
from specdec.params import SamplingParams
from specdec.sampling import RowJob, Sampler

_ROWS = 9  # a draft length of 8, verified
_PARAMS = (
    SamplingParams(seed=1, temperature=0.0),
    SamplingParams(seed=2**63 + 5, temperature=1.0),
    SamplingParams(seed=3, temperature=0.7, min_p=0.02),
)


def probe_sampling(sampler: Sampler, vocab_size: int) -> tuple[ExactnessCheck, ...]:
    """Compare ``sampler`` on rows ``[R, vocab_size]`` together with the same rows alone. Takes some milliseconds."""
    rng = np.random.default_rng(20)
    logits = torch.from_numpy(4.0 * rng.standard_normal((_ROWS * len(_PARAMS), vocab_size), dtype=np.float32))
    return _check_tokens(sampler, logits), _check_normalisers(sampler, logits)


def _check_tokens(sampler: Sampler, logits: Tensor) -> ExactnessCheck:
    jobs = [RowJob(i * _ROWS, _ROWS, params, 5) for i, params in enumerate(_PARAMS) if sampler.batchable(params)]
    together = sampler.sample_batch(logits, jobs)
    alone = {
        job.first_row + i: sampler.sample_batch(
            _alone(logits, job.first_row + i), [RowJob(0, 1, job.params, job.t + i)]
        )[0]
        for job in jobs
        for i in range(job.count)
    }
    differing = sum(together[row] != token for row, token in alone.items())
    what = f"{len(alone)} rows sampled together and alone" if jobs else "rows are sampled one by one"
    return ExactnessCheck("sampling", differing == 0, f"{what}, {differing} differ")


def _check_normalisers(sampler: Sampler, logits: Tensor) -> ExactnessCheck:
    together = sampler.normalisers(logits, 0, logits.shape[0])
    alone = [sampler.normalisers(_alone(logits, row), 0, 1)[0] for row in range(logits.shape[0])]
    differing = sum(a != b for a, b in zip(together, alone, strict=True))
    return ExactnessCheck("logprobs", differing == 0, f"{len(alone)} rows together and alone, {differing} differ")


def _alone(logits: Tensor, row: int) -> Tensor:
    """``[1, V]``, in memory of its own."""
    return logits[row : row + 1].clone()
