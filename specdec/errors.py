"""Failures of one sequence. The step reports them in that sequence's output; the others go on."""

from __future__ import annotations

from typing import Literal

ErrorType = Literal["invalid_request", "server"]  # whose fault a failure is: the request's parameters, or not


class SamplingError(Exception):
    """One sequence cannot be sampled. The text is meant for the client."""

    error_type: ErrorType = "invalid_request"


class NoTokenLeft(SamplingError):
    """Masks, bias and min_tokens together leave no token to choose from."""


class InvalidLogits(SamplingError):
    """The model returned NaN, +infinity or nothing but -infinity for a row that decides a token or a logprob."""

    error_type = "server"
