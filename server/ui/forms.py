"""How steps and finished requests are written in the feed: numbers alone, nothing that a request sent (docs/ui.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcache.manager import KVCacheStats
from scheduler.stats import FinishedChoice, SequenceStep
from specdec.plan import STAGES, StepStats

encode = msgspec.json.Encoder().encode


def step_json(
    n: int,
    time: float,
    stats: StepStats,
    seconds: float,
    sequences: tuple[SequenceStep, ...],
    running: int,
    waiting: int,
    kv: KVCacheStats,
) -> bytes:
    """``time``: seconds since the feed's start; ``seconds``: of the step with all that belongs to it."""
    stages = {name: stats.stage_seconds.get(name, 0.0) for name in STAGES}
    shown = {name: round(each, 7) for name, each in stages.items()}
    shown["other"] = round(max(0.0, seconds - sum(stages.values())), 7)
    return encode(
        {
            "n": n,
            "t": round(time, 4),
            "s": shown,
            "rows": stats.num_rows,
            "seqs": [(s.key, s.num_emitted, s.num_drafted, s.num_accepted, s.drafter) for s in sequences],
            "running": running,
            "waiting": waiting,
            "kv": (kv.free_blocks, kv.used_blocks, kv.cached_blocks, kv.shared_blocks, fragmentation(kv)),
        }
    )


def request_json(choice: FinishedChoice, n: int, started: float) -> bytes:
    """A choice that ended at step ``n``; ``started``: the feed's start, on the clock of its times."""
    timing = choice.timing
    tokens, steps = timing.num_output_tokens, timing.num_spec_steps
    shown: dict[str, Any] = {
        "key": choice.key,
        "choice": choice.index,
        "n": n,
        "t": round(choice.finish_time - started, 4),
        "finish_reason": choice.finish_reason,
        "prompt_tokens": timing.num_prompt_tokens,
        "cached_tokens": timing.num_cached_tokens,
        "output_tokens": tokens,
        "queue_s": round(timing.queue_seconds, 6),
        "ttft_s": round(timing.seconds_to_first_token, 6) if tokens else None,
        "tpot_s": None if timing.seconds_per_token is None else round(timing.seconds_per_token, 6),
        "e2e_s": round(choice.finish_time - timing.arrival_time, 6),
        "steps": steps,
        "drafted": timing.num_drafted,
        "accepted": timing.num_accepted,
        "acceptance_length": round(1 + timing.num_accepted / steps, 4) if steps else None,
        "preemptions": timing.num_preemptions,
    }
    return encode(shown)


def fragmentation(kv: KVCacheStats) -> float:
    return round(kv.fragmentation_ratio or 0.0, 4)
