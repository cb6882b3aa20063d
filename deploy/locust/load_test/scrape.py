"""The server's own account: what its metrics say of the time between two scrapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Names without their prefix. A test of the server holds them to what it exposes.
TIMES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
}
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "generation_tokens_total",
    "preemptions": "num_preemptions_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "cache_queries": "prefix_cache_queries_total",
    "cache_hits": "prefix_cache_hits_total",
}
BY_LABEL = {
    "finished": ("request_success_total", "finished_reason"),
    "rejections": ("admission_rejections_total", "reason"),
    "accepted_by_position": ("spec_decode_num_accepted_tokens_per_pos_total", "position"),
}
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


class Scrape:
    """Samples by name without the prefix and by labels; those of several replicas are summed."""

    def __init__(self, texts: Iterable[str], prefix: str) -> None:
        self.samples: dict[tuple[str, Labels], float] = {}
        for text in texts:
            for line in text.splitlines():
                if not line.startswith(prefix) or (found := _SAMPLE.fullmatch(line.strip())) is None:
                    continue
                try:
                    value = float(found["value"])
                except ValueError:
                    continue
                key = (found["name"].removeprefix(prefix), tuple(_LABEL.findall(found["labels"] or "")))
                self.samples[key] = self.samples.get(key, 0.0) + value


class Window:
    """What happened between two scrapes of the same servers."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._changes: dict[str, dict[Labels, float]] = {}
        counted = ("_total", "_sum", "_count", "_bucket")
        # A counter that fell began anew: a server was restarted, and what it did before is lost.
        self.restarted = any(
            value < before.samples.get(key, 0.0) for key, value in after.samples.items() if key[0].endswith(counted)
        ) or any(key not in after.samples for key in before.samples if key[0].endswith(counted))
        for (name, labels), value in after.samples.items():
            self._changes.setdefault(name, {})[labels] = value - before.samples.get((name, labels), 0.0)

    def change(self, name: str) -> float | None:
        """Of a counter, over all its labels; None if there is none."""
        found = self._changes.get(name)
        return None if found is None else sum(found.values())

    def by_label(self, name: str, label: str) -> dict[str, int]:
        """Changes that are not 0, by the label's value."""
        found: dict[str, int] = {}
        for labels, change in self._changes.get(name, {}).items():
            value = dict(labels).get(label)
            if value is not None and change:
                found[value] = found.get(value, 0) + round(change)
        return found

    def mean(self, name: str) -> tuple[float | None, int]:
        """Of a histogram: sum / count, and count."""
        count = self.change(f"{name}_count") or 0.0
        return (self.change(f"{name}_sum") or 0.0) / count if count else None, round(count)

    def figures(self) -> dict[str, Any]:
        """Seconds; null where the server says nothing. After a restart there is nothing but the word for it."""
        if self.restarted:
            return {"restarted": True, "acceptance": {"rate": None, "length": None}}
        counts = {key: self.change(name) for key, name in COUNTERS.items()}
        times = {}
        for key, name in TIMES.items():
            mean, count = self.mean(name)
            times[key] = {"mean": mean, "count": count}
        return {
            "restarted": False,
            **times,
            "counts": counts,
            **{key: self.by_label(name, label) for key, (name, label) in BY_LABEL.items()},
            "acceptance": {
                "rate": _ratio(counts["accepted"], counts["drafted"]),
                "length": _plus_one(_ratio(counts["accepted"], counts["drafts"])),
            },
            "cache_hit_rate": _ratio(counts["cache_hits"], counts["cache_queries"]),
        }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _plus_one(value: float | None) -> float | None:
    return None if value is None else 1 + value


def all_names() -> set[str]:
    """Of the metrics that are asked for, without the prefix; histograms by their own name."""
    return {*TIMES.values(), *COUNTERS.values(), *(name for name, _ in BY_LABEL.values())}
