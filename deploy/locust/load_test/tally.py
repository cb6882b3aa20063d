"""What the requests of a run, of one of its steps or of one class of prompts came to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .distribution import Distribution
from .record import Record

TIMES = ("ttft", "itl", "tpot", "e2e", "late")


class Tally:
    """Requests that have ended, counted. Two tallies of different requests can be merged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()  # of what was shed or failed: "shed: 503 overloaded"
        self.times = {name: Distribution() for name in TIMES}
        self.first_sent: float | None = None
        self.last_ended: float | None = None

    def add(self, record: Record) -> None:
        """A record that has ended. What came before a cancel or a failure counts: tokens, TTFT, ITL."""
        counts, times = self.counts, self.times
        counts[record.outcome] += 1
        if record.outcome in ("shed", "failed"):
            self.reasons[f"{record.outcome}: {record.reason}"] += 1
        counts["chunks"] += record.num_chunks
        counts["output_tokens"] += record.num_tokens
        counts["prompt_tokens"] += record.num_prompt_tokens
        counts["cached_tokens"] += record.num_cached_tokens
        counts["drafts"] += record.num_drafts
        counts["drafted"] += record.num_drafted
        counts["accepted"] += record.num_accepted
        times["late"].add(record.late)
        for gap in record.gaps:
            times["itl"].add(gap)
        if record.ttft is not None:
            times["ttft"].add(record.ttft)
        if record.e2e is not None:
            times["e2e"].add(record.e2e)
            if record.tpot is not None:
                times["tpot"].add(record.tpot)
        self._stretch(record.sent, record.ended)

    def merge(self, other: Tally) -> None:
        """The times of other machines' clocks cannot be compared, so the longer of both spans is kept."""
        self.counts.update(other.counts)
        self.reasons.update(other.reasons)
        for name in TIMES:
            self.times[name].merge(other.times[name])
        if other.seconds > self.seconds:
            self.first_sent, self.last_ended = other.first_sent, other.last_ended

    def _stretch(self, sent: float, ended: float | None) -> None:
        self.first_sent = sent if self.first_sent is None else min(self.first_sent, sent)
        if ended is not None:
            self.last_ended = ended if self.last_ended is None else max(self.last_ended, ended)

    @property
    def seconds(self) -> float:
        """From the first request sent to the end of the last."""
        if self.first_sent is None or self.last_ended is None:
            return 0.0
        return self.last_ended - self.first_sent

    @property
    def num_ended(self) -> int:
        return sum(self.counts[outcome] for outcome in ("completed", "cancelled", "shed", "failed"))

    def figures(self) -> dict[str, Any]:
        """Seconds, and what is a second; null where nothing was measured."""
        counts, seconds = self.counts, self.seconds
        served = counts["completed"] + counts["cancelled"]
        return {
            "seconds": seconds,
            "requests": {
                "ended": self.num_ended,
                **{outcome: counts[outcome] for outcome in ("completed", "cancelled", "shed", "failed")},
            },
            "reasons": dict(sorted(self.reasons.items())),
            "shares": {name: _ratio(counts[name], self.num_ended) for name in ("shed", "failed", "cancelled")},
            "tokens": {
                "prompt": counts["prompt_tokens"],
                "cached": counts["cached_tokens"],
                "output": counts["output_tokens"],
                "per_chunk": _ratio(counts["output_tokens"], counts["chunks"]),
            },
            "requests_per_second": _ratio(served, seconds),
            "tokens_per_second": _ratio(counts["output_tokens"], seconds),
            "acceptance": {
                "rate": _ratio(counts["accepted"], counts["drafted"]),
                "length": 1 + counts["accepted"] / counts["drafts"] if counts["drafts"] else None,
            },
            **{name: self.times[name].figures() for name in TIMES},
        }

    def to_plain(self) -> dict[str, Any]:
        """As JSON or msgpack can carry it."""
        return {
            "counts": dict(self.counts),
            "reasons": dict(self.reasons),
            "times": {name: times.to_plain() for name, times in self.times.items()},
            "span": [self.first_sent, self.last_ended],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Tally:
        made = cls()
        made.counts.update(plain["counts"])
        made.reasons.update(plain["reasons"])
        made.times = {name: Distribution.from_plain(plain["times"][name]) for name in TIMES}
        made.first_sent, made.last_ended = plain["span"]
        return made


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
