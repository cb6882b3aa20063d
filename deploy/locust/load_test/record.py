"""One request: what was sent, when its tokens came, and how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Outcome = Literal["open", "completed", "cancelled", "shed", "failed"]
DONE = b"[DONE]"
# A 503 with one of these codes is no refusal under load: the server is broken.
BROKEN = ("engine_failed",)
MAX_REASON = 160


@dataclass(slots=True)
class Record:
    """Filled in while the answer comes. ``intended`` is when the request should have been sent, ``sent`` when it was.

    Latencies count from ``intended``: what a late start costs is not left out (no coordinated omission). In a closed
    loop both are the same.

    A gap is the time between two chunks that brought tokens, however many tokens they brought and however they came
    out of the socket. So the sum of the gaps is the time from the first tokens to the last.
    """

    kind: str  # the class of its prompt
    intended: float
    sent: float
    first: float | None = None  # the first chunk with tokens
    last: float | None = None  # the last one
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    num_chunks: int = 0  # with tokens
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafts: int = 0  # by the server's own account of the request: steps with a draft, their tokens, those accepted
    num_drafted: int = 0
    num_accepted: int = 0
    outcome: Outcome = "open"
    reason: str = ""  # of what is shed or failed: few different ones
    retry_after: float = 0.0  # seconds

    @property
    def late(self) -> float:
        return max(0.0, self.sent - self.intended)

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.intended

    @property
    def tpot(self) -> float | None:
        """(last - first) / (tokens - 1); None for fewer than two tokens."""
        if self.first is None or self.last is None or self.num_tokens < 2:
            return None
        return (self.last - self.first) / (self.num_tokens - 1)

    @property
    def e2e(self) -> float | None:
        """To the end of a whole answer; None for any other."""
        return self.ended - self.intended if self.outcome == "completed" and self.ended is not None else None

    def take(self, data: bytes, now: float) -> None:
        """One event of the stream."""
        if self.outcome != "open":
            return
        if data == DONE:
            if self.first is None:
                self.fail("the stream ended without a token", now)
            else:
                self.outcome, self.ended = "completed", now
            return
        try:
            event = json.loads(data)
            error = event.get("error")
            if error is not None:
                self.fail(f"in the stream: {_text_of(error)}", now)
            else:
                self._take_chunk(event, now)
        except (ValueError, TypeError, AttributeError, LookupError) as wrong:
            self.fail(f"a chunk that is none ({type(wrong).__name__})", now)

    def _take_chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        usage = chunk.get("usage") or {}
        choices = chunk.get("choices") or ()
        counted = usage.get("completion_tokens")
        if counted is None:
            # The number of ids if the server tells them, else at least one if there is a text.
            ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
            counted = self.num_tokens + (ids or any(map(_has_text, choices)))
        if choices and counted > self.num_tokens:
            self.num_chunks += 1
            if self.last is None:
                self.first = now
            else:
                self.gaps.append(now - self.last)
            self.last = now
        self.num_tokens = max(self.num_tokens, int(counted))
        if usage:
            self.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or {}
        if speculation:
            self.num_drafts = int(speculation.get("num_spec_steps") or 0)
            self.num_drafted = int(speculation.get("num_draft_tokens") or 0)
            self.num_accepted = int(speculation.get("num_accepted_draft_tokens") or 0)

    def end(self, now: float) -> None:
        """The body is over; without ``[DONE]`` before, the answer was cut."""
        if self.outcome == "open":
            self.fail("the stream ended without [DONE]", now)

    def leave(self, now: float) -> None:
        """The client has had enough."""
        self.outcome, self.ended = "cancelled", now

    def fail(self, reason: str, now: float) -> None:
        self.outcome, self.ended, self.reason = "failed", now, reason[:MAX_REASON]

    def refuse(self, status: int, headers: Mapping[str, str], body: bytes, now: float) -> None:
        """An answer that is no stream. 429, and 503 of a server that works, are shed; all else is a failure."""
        code = _code_of(body)
        if status == 429 or (status == 503 and code not in BROKEN):
            self.outcome, self.ended, self.reason = "shed", now, f"{status} {code}".strip()[:MAX_REASON]
            self.retry_after = _retry_after(headers)
        else:
            self.fail(f"{status} {code}".strip(), now)


def _has_text(choice: Mapping[str, Any]) -> bool:
    """Of a completion or of a chat; the chat's first delta names the role and has no text."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("tool_calls") or delta.get("reasoning_content"))


def _text_of(error: object) -> str:
    return str(error.get("code") or error.get("message") or error) if isinstance(error, dict) else str(error)


def _code_of(body: bytes) -> str:
    """The code of OpenAI's form of an error; empty if it has none, as of a proxy's page."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, TypeError, AttributeError, LookupError):
        return ""


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds; milliseconds win, a date counts as none."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.strip().isdigit():
            return float(text) / unit
    return 0.0
