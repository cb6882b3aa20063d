"""Why a request was not taken. ``reason`` is a short fixed word, fit for a metric's label."""

from __future__ import annotations


class AdmissionError(Exception):
    """The request was refused and left no trace; the message is fit for the client."""

    reason = "refused"


class RequestTooLarge(AdmissionError):
    """It could never run: longer than the context, or than the whole KV pool. ``reason`` says which."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # "context_length" or "kv_capacity"


class QueueFull(AdmissionError):
    """Too many requests, or too many of their prompt tokens, wait already: try again later."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # "queue_full" or "queue_tokens"


class ShuttingDown(AdmissionError):
    """The engine finishes what it has and takes nothing new."""

    reason = "shutting_down"


class EngineUnhealthy(AdmissionError):
    """The engine stopped after faults; the message says which."""

    reason = "unhealthy"
