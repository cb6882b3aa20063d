"""What a live server's metrics say about the checklist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.preflight.checklist import (
    AUDITS,
    Answer,
    Line,
    alerts_line,
    audit_line,
    exactness_line,
    fragmentation_line,
    impossible_line,
    rollback_line,
    slower_line,
)
from bench.preflight.equivalence import with_played
from bench.preflight.play import Played, play
from bench.preflight.report import Findings
from bench.preflight.scrape import Window, watch
from bench.prompts import MIXED_LOAD
from scheduler.audit import AUDIT_RESULTS
from server.commands import CommandError

MAX_POSITIONS = 256  # of a draft; no server of ours drafts so many
_STEP_SECONDS = ("step_duration_seconds_sum", "step_duration_seconds_count")
_ACCEPTANCE = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "spec_decode_num_speculative_tokens_count",
    "generation_tokens_total",
)


def server_lines(window: Window, rules: Path | None) -> list[Line]:
    """Level, fragmentation, rollback, audit and alerts of the server behind ``window``."""
    rolled_back, drafted = "spec_decode_rollback_tokens_total", "spec_decode_num_draft_tokens_total"
    ratio, moved = "kv_fragmentation_ratio", "kv_alignment_bytes_moved_total"
    enabled = "equivalence_audits_enabled"
    return [
        exactness_line(window.info.level, window.info.detail),
        _believed(window, (ratio, "num_requests_running"), fragmentation_line(window.busy_gauges(ratio))),
        _believed(
            window,
            (rolled_back, drafted, moved),
            rollback_line(window.delta(rolled_back), window.delta(drafted), window.after.value(moved)),
        ),
        _believed(
            window,
            (AUDITS, enabled),
            audit_line(window.info.audit_rate, audit_counts(window), window.after.value(enabled)),
        ),
        alerts_line(rules),
    ]


def _believed(window: Window, names: tuple[str, ...], line: Line) -> Line:
    """``line``, unless a sample that it rests on is impossible."""
    what = window.impossible(*names)
    return line if what is None else impossible_line(line.name, what)


def audit_counts(window: Window) -> Mapping[str, float] | None:
    """Audits since the server's start by result; None if it has no such metric."""
    if AUDITS not in window.after.samples:
        return None
    counts = {result: window.after.value(AUDITS, result=result) for result in AUDIT_RESULTS}
    return {result: count for result, count in counts.items() if count is not None}


def acceptance_line(window: Window) -> Line:
    """Whether drafts are accepted at all; what they gain is another line's question."""
    numbers = speculation_numbers(window)
    per_step, length = numbers["tokens_per_step"], numbers["acceptance_length"]
    name = "acceptance"
    what = window.impossible(*_ACCEPTANCE)
    if what is None and max(numbers["acceptance_rate"] or 0.0, *numbers["rate_at"], 0.0) > 1:
        what = "more draft tokens were accepted than were drafted"
    if what is not None:
        return impossible_line(name, what, numbers)
    if length is None or per_step is None:
        return Line(name, "unknown", "the server verified no draft while we looked", numbers)
    positions = " ".join(f"{100 * rate:.0f}%" for rate in numbers["rate_at"])
    reason = (
        f"{numbers['acceptance_rate']:.0%} of the draft tokens are accepted, acceptance length {length:.2f}, "
        f"{per_step:.2f} tokens a step; by position {positions}"
    )
    return Line(name, "yes" if length > 1 else "no", reason, numbers)


def speculation_numbers(window: Window) -> dict[str, Any]:
    """Acceptance by position: accepted there / drafts; tokens a step: an upper bound of the gain."""
    drafts = window.delta("spec_decode_num_drafts_total")
    rates: list[float] = []
    while drafts and len(rates) < MAX_POSITIONS:
        accepted = window.delta("spec_decode_num_accepted_tokens_per_pos_total", position=str(len(rates)))
        if accepted is None:
            break
        rates.append(accepted / drafts)
    rate = window.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")
    length = window.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_drafts_total")
    return {
        "acceptance_rate": rate,
        "acceptance_length": None if length is None else 1.0 + length,
        "tokens_per_step": window.ratio("generation_tokens_total", "spec_decode_num_speculative_tokens_count"),
        "rate_at": rates,
    }


def load_numbers(window: Window) -> dict[str, float | None]:
    """Rates a second and latencies in seconds, over the window (or since the start, if nothing happened in it)."""
    seconds = None if window.since_start else window.seconds
    tokens = window.delta("generation_tokens_total")
    running = [value for scrape in window.gauges if (value := scrape.value("num_requests_running")) is not None]
    waiting = [value for scrape in window.gauges if (value := scrape.value("num_requests_waiting")) is not None]
    return {
        "tokens_per_second": tokens / seconds if tokens is not None and seconds else None,
        "running": sum(running) / len(running) if running else None,
        "waiting": sum(waiting) / len(waiting) if waiting else None,
        "rows_per_step": window.mean("iteration_tokens_total"),
        "verify_seconds": window.mean("step_duration_seconds", stage="verify"),
        "ttft_p50": window.quantile("time_to_first_token_seconds", 0.5),
        "ttft_p95": window.quantile("time_to_first_token_seconds", 0.95),
        "itl_p50": window.quantile("inter_token_latency_seconds", 0.5),
        "itl_p95": window.quantile("inter_token_latency_seconds", 0.95),
        "preemptions": window.delta("num_preemptions_total"),
    }


def memory_bound_unknown(window: Window) -> Line:
    """One server has one operating point; the slope of the step time takes a measurement."""
    load = load_numbers(window)
    rows, seconds = load["rows_per_step"], load["verify_seconds"]
    what = window.impossible("iteration_tokens_total_sum", "iteration_tokens_total_count", *_STEP_SECONDS)
    if what is not None:
        return impossible_line("memory-bound", what)
    point = "the server ran no step" if not rows or not seconds else f"{rows:.1f} rows in {1e3 * seconds:.1f} ms a step"
    reason = f"metrics hold one operating point ({point}); --traffic on this machine measures t(rows)"
    return Line("memory-bound", "unknown", reason, {"rows_per_step": rows, "verify_seconds": seconds})


def against_plain_lines(played: Played | None, how: str) -> list[Line]:
    """ITL and TTFT with speculation against without. ``how``: what to do if it was not played."""
    names = ("ITL against plain", "TTFT against plain")
    if played is None:
        return [Line(name, "unknown", f"not measured; {how}") for name in names]
    at = f"at concurrency {played.concurrency}"
    return [
        # A chunk of a speculative step holds several tokens: only the time of one token compares like with like.
        slower_line(names[0], played.tpot, f"{at} a token takes"),
        slower_line(names[1], played.ttft, f"{at} the first token takes"),
    ]


def preflight_live(
    url: str,
    *,
    seconds: float,
    probe: int,
    tokens: int,
    rounds: int,
    rules: Path | None,
    verify: Callable[[], Line],
    report: Callable[[str], None],
) -> Findings:
    """Of a server that runs. With ``probe`` requests are sent to it, so many each way; else it is only looked at.

    Raises CommandError, one line, if there is no such server, or one without these metrics.
    """
    report(f"looking at {url} for {seconds:g} seconds")
    seen = watch(url, seconds)
    played = None
    if probe:
        if seen.info.served_name is None:
            raise CommandError(f"--url {url}: --probe needs the model's name, and /v1/server_info has no served_names")
        bodies = [
            {
                "model": seen.info.served_name,
                "prompt": MIXED_LOAD[i % len(MIXED_LOAD)].text,
                "max_tokens": tokens,
                "temperature": 0,
            }
            for i in range(probe)
        ]
        running = load_numbers(seen)["running"] or 1.0
        concurrency = max(1, min(probe, round(running)))
        played = play(url, bodies, concurrency=concurrency, rounds=rounds, progress=report)
    # What was sent shows in the metrics: of an idle server they are all that there is.
    told = played.window if played is not None and seen.since_start else seen
    level, fragmentation, rollback, audit, alerts = server_lines(told, rules)
    acceptance = acceptance_line(told)
    against_plain = against_plain_lines(played, "--probe N sends N requests each way")
    return Findings(
        source=url,
        model=seen.info.model,
        fit=_fit(told, against_plain[0]),
        checklist=[
            with_played(verify(), played),
            level,
            memory_bound_unknown(told),
            acceptance,
            *against_plain,
            fragmentation,
            rollback,
            audit,
            alerts,
        ],
        server={"window": _window_text(told), **load_numbers(told), **speculation_numbers(told)},
    )


def _fit(window: Window, itl: Line) -> Line:
    """Measured if it was; the tokens of a step bound it from above in any case."""
    name = "fit for speculation"
    bound = speculation_numbers(window)["tokens_per_step"]
    numbers: dict[str, float | int | str | None] = {"tokens_per_step": bound, "gain": itl.numbers.get("ratio")}
    gain = itl.numbers.get("ratio")
    if isinstance(gain, float):
        answer: Answer = "yes" if gain > 1 and itl.answer == "yes" else "no" if itl.answer == "no" else "unknown"
        return Line(name, answer, f"measured gain {gain:.2f} times with the requests of --probe", numbers)
    what = window.impossible(*_ACCEPTANCE)
    if what is not None:
        return impossible_line(name, what, numbers)
    if bound is None:
        return Line(name, "unknown", "no request was decoded while we looked", numbers)
    if bound <= 1.0:
        return Line(name, "no", f"a step emits {bound:.2f} tokens, so drafts gain nothing", numbers)
    return Line(name, "unknown", f"at most {bound:.2f} times (tokens a step); --probe N measures it", numbers)


def _window_text(window: Window) -> str:
    if window.since_start:
        return "since its start (no step ran while we looked)"
    return f"over {window.seconds:.1f} s"
