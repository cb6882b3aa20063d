"""How the server stands now, in the form of GET /ui/state: docs/ui.md says what each number means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from server.service import Service
from server.ui.break_even import break_even, step_curve
from server.ui.feed import Feed, KeptStep
from server.ui.forms import fragmentation
from server.version import VERSION

WINDOW_SECONDS = 5.0  # of the rates of now
RECENT = 50


def state(service: Service, feed: Feed) -> dict[str, Any]:
    """What is told of an engine in another process is what it said when it was last refreshed."""
    steps = list(feed.newest())
    shares = acceptance_by_position(steps)
    return {
        "server": _server(service, feed),
        "now": _now(service, feed, steps),
        "acceptance": {
            "by_position": _rounded(shares),
            "break_even": _break_even(service.speculation(), shares, steps, service.facts.num_speculative_tokens),
        },
        "recent": [msgspec.Raw(json) for json in islice(reversed(feed.finished()), RECENT)],
        "seq": feed.seq,
    }


def acceptance_by_position(steps: Sequence[KeptStep]) -> list[float]:
    """Of the drafts of at least 1, 2, .. tokens, the share of which so many were accepted."""
    lengths: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for step in steps:
        for each in step.sequences:
            if each.num_drafted:
                lengths[each.num_drafted] += 1
                accepted[each.num_accepted] += 1
    shares = []
    tried, right = sum(lengths.values()), sum(accepted.values())
    for i in range(1, max(lengths, default=0) + 1):
        tried -= lengths[i - 1]
        right -= accepted[i - 1]
        shares.append(right / tried)
    return shares


def _server(service: Service, feed: Feed) -> dict[str, Any]:
    facts, info, settings = service.facts, service.info, service.settings
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
        "max_running": settings.max_num_seqs,
        "unready": service.unready_reason,
    }


def _now(service: Service, feed: Feed, steps: Sequence[KeptStep]) -> dict[str, Any]:
    kv = feed.kv
    since = feed.started + feed.uptime - WINDOW_SECONDS
    late = [step for step in steps if step.time > since]
    drafted = [each for step in steps for each in step.sequences if each.num_drafted]
    expected = [step.stats.expected_speedup for step in late if step.stats.expected_speedup is not None]
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
        "acceptance_length": (
            round(1 + sum(each.num_accepted for each in drafted) / len(drafted), 4) if drafted else None
        ),
        "expected_speedup": round(sum(expected) / len(expected), 4) if expected else None,
    }


def _break_even(
    speculation: Mapping[str, Any], shares: Sequence[float], steps: Sequence[KeptStep], positions: int
) -> list[float] | None:
    cost = step_curve(speculation.get("step_seconds"))
    if cost is None:
        return None
    sizes = [len(step.sequences) for step in steps if step.sequences]
    drafters = Counter(each.drafter for step in steps for each in step.sequences if each.num_drafted)
    (most, _), *_ = drafters.most_common(1) or [("", 0)]
    rounds = next((each["round_seconds"] for each in speculation["drafters"] if each["name"] == most), None)
    costly = step_curve(rounds)
    lines = break_even(
        shares,
        positions=positions,
        batch=max(1, round(sum(sizes) / len(sizes))) if sizes else 1,
        step=cost.seconds,
        draft_round=None if costly is None else costly.seconds,
    )
    return _rounded(lines)


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in numbers]
