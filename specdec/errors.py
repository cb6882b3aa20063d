"""Failures of one sequence. The step reports them in that sequence's output; the others go on."""

from __future__ import annotations


class SamplingError(Exception):
    """One sequence cannot be sampled. The text is meant for the client."""


class NoTokenLeft(SamplingError):
    """Masks, bias and min_tokens together leave no token to choose from."""


class InvalidLogits(SamplingError):
    """The model returned NaN or +infinity for a row that decides a token or a logprob."""
