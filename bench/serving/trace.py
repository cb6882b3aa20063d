"""What one request saw, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

OK, REFUSED, FAILED, CUT = "ok", "refused", "failed", "cut"
SHED_STATUSES = (429, 503)
ENGINE_FAILED = "engine_failed"  # a 503 that is no shedding


@dataclass(slots=True)
class Trace:
    """Times are of one monotonic clock, in seconds.

    ``planned`` is when the request should have been sent: latencies count from there, so that a load generator that
    falls behind hides nothing. ``chunks`` are the chunks that brought tokens: when each came and how many tokens it
    held (of a server that sends no ids 1, as chunks are then all there is to count).
    """

    prompt: str  # name of the prompt
    planned: float
    sent: float = 0.0
    ended: float = 0.0
    outcome: str = FAILED
    reason: str = "never sent"
    chunks: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.outcome == OK

    @property
    def num_tokens(self) -> int:
        """Output tokens: those of ``usage``, else the ids, else the chunks."""
        counted = self.usage.get("completion_tokens")
        if isinstance(counted, int) and not isinstance(counted, bool) and counted >= 0:
            return counted
        return len(self.token_ids) or len(self.chunks)

    @property
    def num_prompt_tokens(self) -> int:
        """0 if the server does not say."""
        counted = self.usage.get("prompt_tokens")
        return counted if isinstance(counted, int) and not isinstance(counted, bool) and counted >= 0 else 0

    @property
    def ttft(self) -> float | None:
        """From ``planned`` to the first chunk with tokens."""
        return self.chunks[0][0] - self.planned if self.chunks else None

    @property
    def gaps(self) -> list[float]:
        """Between chunks with tokens: one value a gap, however many tokens the chunks hold."""
        return [after - before for (before, _), (after, _) in pairwise(self.chunks)]

    @property
    def tpot(self) -> float | None:
        """(last chunk - first chunk) / (tokens - 1); None for fewer than two tokens."""
        if not self.chunks or self.num_tokens < 2:
            return None
        return (self.chunks[-1][0] - self.chunks[0][0]) / (self.num_tokens - 1)

    @property
    def e2e(self) -> float:
        """From ``planned`` to the last chunk of the choice."""
        return self.ended - self.planned

    @property
    def late(self) -> float:
        """How much later than planned it was sent."""
        return self.sent - self.planned

    @property
    def queue_seconds(self) -> float | None:
        """Of the server's own account in the answer."""
        value = self.metrics.get("queue_time_ms")
        return value / 1e3 if isinstance(value, int | float) and not isinstance(value, bool) else None

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """One event of the stream."""
        usage, metrics = event.get("usage"), event.get("metrics")
        if isinstance(usage, dict):
            self.usage = usage
        if isinstance(metrics, dict):
            self.metrics = metrics
        choices = event.get("choices")
        if not isinstance(choices, list):
            return
        for choice in choices:
            ids, text = _brought(choice)
            if choice.get("finish_reason") is not None:
                self.finish_reason = str(choice["finish_reason"])
            if ids or text:
                self.token_ids += ids
                self.text += text
                self.chunks.append((now, len(ids) or 1))
            self.ended = now


def _brought(choice: Any) -> tuple[list[int], str]:
    delta = choice.get("delta")
    text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
    ids = choice.get("token_ids")
    return (ids if isinstance(ids, list) else []), (text if isinstance(text, str) else "")
