"""What the server's own metrics say of the runs of one mode: the figures that no client can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.preflight.scrape import Scrape
from server.metrics.labels import BUILD_PARTS, KV_SLOT_STATES
from specdec.plan import STAGES

OURS, VLLM = "truedraft_", "vllm:"
PREFIXES = (OURS, VLLM)
# Mean seconds by the server's account: sum / count of a histogram.
TIMES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2el": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}


@dataclass(frozen=True, slots=True)
class Account:
    """Two scrapes around one run."""

    before: Scrape
    after: Scrape

    def grown(self, name: str, **labels: str) -> float | None:
        """None if the server does not have it, or it went down."""
        after = self.after.value(name, **labels)
        if after is None:
            return None
        grown = after - (self.before.value(name, **labels) or 0.0)
        return grown if grown >= 0 else None


def prefix_of(text: str) -> str | None:
    """Whose metrics they are; None: of nobody whose names are known."""
    return next((prefix for prefix in PREFIXES if any(line.startswith(prefix) for line in text.splitlines())), None)


def total(accounts: Sequence[Account], name: str, **labels: str) -> float | None:
    """Growth over all runs; None if one of them has it not."""
    grown = [account.grown(name, **labels) for account in accounts]
    known = [value for value in grown if value is not None]
    return sum(known) if known and len(known) == len(grown) else None


def engine_figures(accounts: Sequence[Account]) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures, None where there is nothing to tell, and for each missing one why."""
    missing: dict[str, str] = {}

    def of(name: str, **labels: str) -> float | None:
        return total(accounts, name, **labels)

    def need(figure: str, *names: str) -> bool:
        lacking = [name for name in names if of(name) is None]
        if lacking:
            missing[figure] = f"its /metrics has no {', '.join(lacking)}"
        return not lacking

    figures: dict[str, Any] = {
        "acceptance": _acceptance(accounts),
        "draft_cost": None,
        "alignment": None,
        "fragmentation": None,
        "step": None,
        "prefix_hit_rate": _ratio(of("prefix_cache_hits_total"), of("prefix_cache_queries_total")),
        "preemptions": of("num_preemptions_total"),
        "generation_tokens": of("generation_tokens_total"),
        "prompt_tokens": of("prompt_tokens_total"),
        "server_times_ms": _times(accounts),
        "draft_length": _ratio(
            of("spec_decode_num_speculative_tokens_sum"), of("spec_decode_num_speculative_tokens_count")
        ),
    }
    if figures["acceptance"] is None:
        need("acceptance length", "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_total")
    if need("draft cost", "step_duration_seconds_sum"):
        step = figures["step"] = _step(accounts)
        rows = of("iteration_tokens_total_sum")
        rejected = of("spec_decode_rollback_tokens_total")
        figures["draft_cost"] = {
            "share_of_step": step["shares"].get("draft"),
            "ms_per_step": _times_1000(_ratio(of("step_duration_seconds_sum", stage="draft"), step["steps"])),
            "rejected_rows_share": _ratio(rejected, rows),
        }
    if need("alignment overhead", "kv_alignment_bytes_moved_total", "kv_blocks_moved_total"):
        figures["alignment"] = _alignment(accounts, figures["step"])
    if need("KV fragmentation", "kv_slot_steps_total"):
        figures["fragmentation"] = _fragmentation(accounts)
    return figures, missing


def _acceptance(accounts: Sequence[Account]) -> dict[str, Any] | None:
    drafts = total(accounts, "spec_decode_num_drafts_total")
    drafted = total(accounts, "spec_decode_num_draft_tokens_total")
    accepted = total(accounts, "spec_decode_num_accepted_tokens_total")
    if drafts is None or drafted is None or accepted is None:
        return None
    positions: list[float] = []
    while drafts and len(positions) < 64:
        at = total(accounts, "spec_decode_num_accepted_tokens_per_pos_total", position=str(len(positions)))
        if at is None:
            break
        positions.append(at / drafts)
    return {
        "length": 1.0 + accepted / drafts if drafts else None,
        "rate": _ratio(accepted, drafted),
        "drafts": int(drafts),
        "draft_tokens": int(drafted),
        "accepted_tokens": int(accepted),
        "by_position": positions,
        "source": "the server's metrics",
    }


def _step(accounts: Sequence[Account]) -> dict[str, Any]:
    seconds = {stage: total(accounts, "step_duration_seconds_sum", stage=stage) or 0.0 for stage in STAGES}
    steps = total(accounts, "step_duration_seconds_count", stage="verify") or 0.0
    whole = sum(seconds.values())
    return {
        "steps": int(steps),
        "ms": _times_1000(_ratio(whole, steps)),
        "seconds": whole,
        "shares": {stage: value / whole for stage, value in seconds.items()} if whole else {},
        "rows": _ratio(total(accounts, "iteration_tokens_total_sum"), total(accounts, "iteration_tokens_total_count")),
    }


def _alignment(accounts: Sequence[Account], step: dict[str, Any] | None) -> dict[str, Any]:
    parts = {part: total(accounts, "batch_build_seconds_sum", part=part) for part in BUILD_PARTS}
    whole = None if step is None else step["seconds"]
    return {
        "bytes_moved": int(total(accounts, "kv_alignment_bytes_moved_total") or 0),
        "blocks_moved": int(total(accounts, "kv_blocks_moved_total") or 0),
        "blocks_trimmed": int(total(accounts, "kv_blocks_trimmed_total") or 0),
        "rollback_share_of_step": None if step is None else step["shares"].get("rollback"),
        "build_share_of_step": None if step is None else step["shares"].get("build"),
        "build_parts_share_of_step": {part: _ratio(seconds, whole) for part, seconds in parts.items()},
    }


def _fragmentation(accounts: Sequence[Account]) -> dict[str, Any]:
    slots = {state: total(accounts, "kv_slot_steps_total", state=state) or 0.0 for state in KV_SLOT_STATES}
    whole = sum(slots.values())
    shares = {state: value / whole if whole else 0.0 for state, value in slots.items()}
    return {"ratio": 1.0 - shares["used"] if whole else 0.0, **shares}


def _times(accounts: Sequence[Account]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, metric in TIMES.items():
        count = total(accounts, f"{metric}_count")
        mean = _times_1000(_ratio(total(accounts, f"{metric}_sum"), count))
        found[name] = None if mean is None or count is None else {"mean": mean, "count": int(count)}
    return found


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _times_1000(value: float | None) -> float | None:
    return None if value is None else 1e3 * value
