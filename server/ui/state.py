"""How the server stands now, in the form of GET /ui/state: docs/ui.md says what each number means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

import msgspec

from server.service import Service
from server.ui.break_even import break_even, step_curve
from server.ui.feed import Feed, KeptStep
from server.ui.forms import fragmentation
from server.version import VERSION

WINDOW_SECONDS = 5.0  # of the rates of now
SUMMED_SEQUENCES = 4096  # in the newest steps, which the rest is of: this works in the event loop
RECENT = 50


def state(service: Service, feed: Feed) -> dict[str, Any]:
    """What is told of an engine in another process is what it said when it was last refreshed."""
    drafts = Drafts(feed.newest())
    return {
        "server": _server(service, feed),
        "now": _now(service, feed, drafts),
        "acceptance": {
            "by_position": _rounded(drafts.shares),
            "break_even": _break_even(service.speculation(), drafts, service.facts.num_speculative_tokens),
        },
        "recent": [msgspec.Raw(json) for json in islice(reversed(feed.finished()), RECENT)],
        "seq": feed.seq,
    }


class Drafts:
    """What became of the drafts of the newest steps, which come newest first."""

    def __init__(self, steps: Iterable[KeptStep], most: int = SUMMED_SEQUENCES) -> None:
        self.drafters: Counter[str] = Counter()
        self._lengths: Counter[int] = Counter()  # of drafts
        self._accepted: Counter[int] = Counter()  # drafts of which so many tokens were
        self._num_steps = self._num_sequences = 0
        for step in steps:
            if self._num_sequences >= most:
                break
            if not step.sequences:
                continue
            self._num_steps += 1
            self._num_sequences += len(step.sequences)
            for each in step.sequences:
                if each.num_drafted:
                    self._lengths[each.num_drafted] += 1
                    self._accepted[each.num_accepted] += 1
                    self.drafters[each.drafter] += 1

    @property
    def shares(self) -> list[float]:
        """Of the drafts of at least 1, 2, .. tokens, the share of which so many were accepted."""
        shares = []
        tried, right = self._lengths.total(), self._accepted.total()
        for i in range(1, max(self._lengths, default=0) + 1):
            tried -= self._lengths[i - 1]
            right -= self._accepted[i - 1]
            shares.append(right / tried)
        return shares

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted tokens / drafts; None without drafts."""
        drafts = self._lengths.total()
        return 1 + sum(length * count for length, count in self._accepted.items()) / drafts if drafts else None

    @property
    def batch(self) -> int:
        """How many sequences got tokens in a step, on average; 1 without any."""
        return max(1, round(self._num_sequences / self._num_steps)) if self._num_steps else 1


def _server(service: Service, feed: Feed) -> dict[str, Any]:
    facts, info = service.facts, service.info
    return {
        "model": facts.names[0],
        "fingerprint": service.fingerprint,
        "level": info["exactness"]["level"],
        "version": VERSION,
        "uptime_s": round(feed.uptime, 3),
        "block_size": info["kv_cache"]["block_size"],
        "num_blocks": info["kv_cache"]["num_blocks"],
        "num_speculative_tokens": facts.num_speculative_tokens,
        "drafters": list(facts.drafters),
        "trace": service.settings.speculation_trace,
        "max_running": service.settings.max_num_seqs,
        "unready": service.unready_reason,
    }


def _now(service: Service, feed: Feed, drafts: Drafts) -> dict[str, Any]:
    kv = feed.kv
    late = list(takewhile(lambda step: step.time > feed.started + feed.uptime - WINDOW_SECONDS, feed.newest()))
    expected = [step.stats.expected_speedup for step in late if step.stats.expected_speedup is not None]
    length = drafts.acceptance_length
    return {
        "running": feed.running,
        "waiting": feed.waiting,
        "kv": {
            "free": service.info["kv_cache"]["num_blocks"] if kv is None else kv.free_blocks,
            "used": 0 if kv is None else kv.used_blocks,
            "cached": 0 if kv is None else kv.cached_blocks,
            "shared": 0 if kv is None else kv.shared_blocks,
            "fragmentation": 0.0 if kv is None else fragmentation(kv),
        },
        "tokens_per_s": round(sum(step.tokens for step in late) / min(WINDOW_SECONDS, max(feed.uptime, 1e-3)), 3),
        "acceptance_length": None if length is None else round(length, 4),
        "expected_speedup": round(sum(expected) / len(expected), 4) if expected else None,
    }


def _break_even(speculation: Mapping[str, Any], drafts: Drafts, positions: int) -> list[float] | None:
    cost = step_curve(speculation.get("step_seconds"))
    if cost is None:
        return None
    (most, _), *_ = drafts.drafters.most_common(1) or [("", 0)]
    rounds = next((each["round_seconds"] for each in speculation["drafters"] if each["name"] == most), None)
    costly = step_curve(rounds)
    lines = break_even(
        drafts.shares,
        positions=positions,
        batch=drafts.batch,
        step=cost.seconds,
        draft_round=None if costly is None else costly.seconds,
    )
    return _rounded(lines)


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in numbers]
