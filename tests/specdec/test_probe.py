"""The sampling part of the load-time probe passes for what is exact, and sees what is not."""

from __future__ import annotations

import pytest
from torch import Tensor

from model.errors import ModelError
from model.exactness import ExactnessCheck, ExactnessReport
from model.kernels import get_kernels
from specdec.probe import probe_sampling
from specdec.sampling import Sampler
from tests.specdec.builders import NumpyKernels

VOCAB = 1003


class _CrossTalk(NumpyKernels):
    """Kernels whose results depend on how many rows come together."""

    def __init__(self, broken: str) -> None:
        super().__init__()
        self._broken = broken

    def logsumexp_rows(self, logits: Tensor) -> Tensor:
        nudge = 1e-13 * (logits.shape[0] - 1) if self._broken == "logprobs" else 0.0
        return super().logsumexp_rows(logits) + nudge

    def argmax_rows(self, logits: Tensor) -> Tensor:
        shift = int(logits.shape[0] > 1) if self._broken == "sampling" else 0
        return super().argmax_rows(logits) + shift


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(NumpyKernels()), Sampler(get_kernels())])
def test_our_samplers_pass(sampler: Sampler) -> None:
    assert all(check.passed for check in probe_sampling(sampler, VOCAB))


@pytest.mark.parametrize("broken", ["sampling", "logprobs"])
def test_rows_that_influence_each_other_are_seen(broken: str) -> None:
    checks = probe_sampling(Sampler(_CrossTalk(broken)), VOCAB)
    assert [check.name for check in checks if not check.passed] == [broken]


def test_a_failed_check_takes_the_level_with_it() -> None:
    report = ExactnessReport("L0", (), "the forward is exact")
    assert report.with_checks((ExactnessCheck("a", True, ""),)).level == "L0"
    worse = report.with_checks((ExactnessCheck("a", True, ""), ExactnessCheck("b", False, "2 differ")))
    assert worse.level == "L2"
    assert "b: 2 differ" in worse.detail


def test_only_a_batch_of_some_size_may_be_wrong_and_is_found() -> None:
    class Odd(NumpyKernels):
        def logsumexp_rows(self, logits: Tensor) -> Tensor:
            return super().logsumexp_rows(logits) + 1e-13 * (logits.shape[0] == 5)

    checks = probe_sampling(Sampler(Odd()), VOCAB)
    assert [check.name for check in checks if not check.passed] == ["logprobs"]
    assert "5 normalisers of 5 rows differ" in checks[1].detail


def test_a_required_level_that_is_not_reached_is_an_error_with_the_reason() -> None:
    exact = ExactnessReport("L0", (), "the forward is exact")
    exact.require_exact("some model")
    with pytest.raises(ModelError, match="some model reaches exactness L2 only, and L0 is required: b: 2 differ"):
        exact.with_checks((ExactnessCheck("b", False, "2 differ"),)).require_exact("some model")
