"""What the client saw, as numbers: percentiles, throughput, goodput, under the names of ``vllm bench serve``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.serving.loops import LoadResult
from bench.serving.options import Slo
from bench.serving.trace import CUT, FAILED, REFUSED, Trace

PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "itl", "e2el")


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear between the closest ranks, as numpy's and vLLM's; None of nothing."""
    return float(np.percentile(np.asarray(values, dtype=np.float64), q)) if len(values) else None


def summary(seconds: Sequence[float], name: str) -> dict[str, float | None]:
    """``mean_<name>_ms`` and so on, in milliseconds; all None of nothing."""
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    some = len(values) > 0
    found: dict[str, float | None] = {
        f"mean_{name}_ms": float(values.mean()) if some else None,
        f"median_{name}_ms": float(np.median(values)) if some else None,
        f"std_{name}_ms": float(values.std()) if some else None,
    }
    for q in PERCENTILES:
        found[f"p{q}_{name}_ms"] = percentile(list(values), q)
    return found


def times_of(traces: Sequence[Trace]) -> dict[str, list[float]]:
    """Seconds by name, of whole answers. ITL has one value for each gap between two chunks with tokens."""
    done = [trace for trace in traces if trace.ok]
    return {
        "ttft": [trace.ttft for trace in done if trace.ttft is not None],
        "tpot": [trace.tpot for trace in done if trace.tpot is not None],
        "itl": [gap for trace in done for gap in trace.gaps],
        "e2el": [trace.e2e for trace in done],
    }


def is_good(trace: Trace, slos: Sequence[Slo]) -> bool:
    """Answered in whole, and within every objective; a figure that a request has not (TPOT of one token) is met."""
    if not trace.ok:
        return False
    gaps = trace.gaps
    worst = {"ttft": trace.ttft, "tpot": trace.tpot, "itl": max(gaps) if gaps else None, "e2el": trace.e2e}
    return all((value := worst[slo.name]) is None or 1e3 * value <= slo.milliseconds for slo in slos)


def client_figures(runs: Sequence[LoadResult], slos: Sequence[Slo]) -> dict[str, Any]:
    """All rounds of one cell and mode together, under the field names of ``vllm bench serve``'s result."""
    traces = [trace for run in runs for trace in run.traces]
    done = [trace for trace in traces if trace.ok]
    duration = sum(run.duration for run in runs)
    prompt_tokens, output_tokens = sum(t.num_prompt_tokens for t in done), sum(t.num_tokens for t in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(traces) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(done), duration),
        "request_goodput": _rate(sum(is_good(t, slos) for t in traces), duration) if slos else None,
        "output_throughput": _rate(output_tokens, duration),
        "total_token_throughput": _rate(prompt_tokens + output_tokens, duration),
        "max_output_tokens_per_s": max((_peak_tokens(run.traces) for run in runs), default=0.0),
        "max_concurrent_requests": max((_peak_requests(run.traces) for run in runs), default=0),
    }
    for name, seconds in times_of(traces).items():
        figures |= summary(seconds, name)
    return figures


def round_figures(run: LoadResult) -> dict[str, Any]:
    """One round by itself, for medians and their spread."""
    done = [trace for trace in run.traces if trace.ok]
    times = times_of(run.traces)
    return {
        "duration": run.duration,
        "completed": len(done),
        "output_throughput": _rate(sum(trace.num_tokens for trace in done), run.duration),
        **{f"median_{name}_ms": _ms(percentile(times[name], 50)) for name in TIMES},
        **{f"p99_{name}_ms": _ms(percentile(times[name], 99)) for name in TIMES},
    }


def outcome_figures(traces: Sequence[Trace], slos: Sequence[Slo]) -> dict[str, Any]:
    """What did not end well, by kind and reason, and beside the times what no field of vLLM's has."""
    done = [trace for trace in traces if trace.ok]
    queue = [seconds for trace in done if (seconds := trace.queue_seconds) is not None]
    chunks = sum(len(trace.chunks) for trace in done)
    late = [trace.late for trace in traces if trace.sent]
    return {
        "requests": len(traces),
        "refused": _reasons(traces, REFUSED),
        "failures": _reasons(traces, FAILED, CUT),
        "queue_ms": _plain(summary(queue, "queue")) if queue else None,
        "late_start_ms": {"p50": _ms(percentile(late, 50)), "p99": _ms(percentile(late, 99))},
        "tokens_per_chunk": sum(trace.num_tokens for trace in done) / chunks if chunks else None,
        "num_gaps": sum(len(trace.gaps) for trace in done),
        "good_share": sum(is_good(t, slos) for t in traces) / len(traces) if slos and traces else None,
        "cached_prompt_tokens": sum(_cached(trace) for trace in done),
    }


def acceptance_of_answers(traces: Sequence[Trace]) -> dict[str, Any] | None:
    """Of the ``metrics`` that our answers carry; None if none does."""
    told = [one for trace in traces if trace.ok and isinstance(one := trace.metrics.get("speculative_decoding"), dict)]
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    try:
        drafts, drafted, accepted = (sum(int(one[name]) for one in told) for name in names)
    except (KeyError, TypeError, ValueError):
        return None
    if not told:
        return None
    return {
        "length": 1.0 + accepted / drafts if drafts else None,
        "rate": accepted / drafted if drafted else None,
        "drafts": drafts,
        "draft_tokens": drafted,
        "accepted_tokens": accepted,
        "by_position": [],
        "source": "the answers",
    }


def _reasons(traces: Sequence[Trace], *outcomes: str) -> dict[str, int]:
    counts = Counter(trace.reason for trace in traces if trace.outcome in outcomes)
    return dict(counts.most_common())


def _cached(trace: Trace) -> int:
    details = trace.usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else 0


def _peak_tokens(traces: Sequence[Trace]) -> float:
    """Tokens of the best whole second since the start. Of a chunk without ids each counts 1, as vLLM counts."""
    chunks = [chunk for trace in traces if trace.ok for chunk in trace.chunks]
    if not chunks:
        return 0.0
    start = min(trace.planned for trace in traces)
    seconds: Counter[int] = Counter()
    for time, tokens in chunks:
        seconds[math.floor(time - start)] += tokens
    return float(max(seconds.values()))


def _peak_requests(traces: Sequence[Trace]) -> int:
    """Most that were under way at one time."""
    changes = sorted([(t.sent, 1) for t in traces if t.sent] + [(t.ended, -1) for t in traces if t.sent])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _plain(found: dict[str, float | None]) -> dict[str, float | None]:
    """``p50_queue_ms`` as ``p50``."""
    return {name.partition("_")[0]: value for name, value in found.items()}


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
