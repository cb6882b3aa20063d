"""From pairs of runs to the figures of a cell, and again without the outputs that repeat themselves."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.speculation.ratios import Interval, median_interval
from bench.speculation.runs import RequestRun, Run

Keep = Callable[[RequestRun], bool]
OTHER_STAGES = "other"


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests without speculation and with it, one run after the other."""

    off: Run
    on: Run


@dataclass(frozen=True, slots=True)
class Drafts:
    """Acceptance over some requests. None where nothing was drafted."""

    acceptance_length: float  # 1 + accepted tokens / drafts; 1 without a draft
    by_position: tuple[float, ...]  # accepted up to there / drafts that had the position
    tokens_per_step: float  # of one sequence in a decode step, with a draft or without
    drafting_share: float  # decode steps of a sequence that had a draft
    draft_length: float  # mean, over all decode steps


def drafts_of(requests: Sequence[RequestRun]) -> Drafts:
    """Counts of all ``requests`` together."""
    drafted: list[int] = []
    accepted: list[int] = []
    for request in requests:
        _add(drafted, request.counts.drafted)
        _add(accepted, request.counts.accepted)
    accepted += [0] * (len(drafted) - len(accepted))
    steps = sum(request.counts.steps for request in requests)
    drafting = sum(request.counts.drafting_steps for request in requests)
    emitted = sum(request.counts.emitted for request in requests)
    return Drafts(
        acceptance_length=1.0 + sum(accepted) / drafting if drafting else 1.0,
        by_position=tuple(a / d for a, d in zip(accepted, drafted, strict=True)),
        tokens_per_step=emitted / steps if steps else 0.0,
        drafting_share=drafting / steps if steps else 0.0,
        draft_length=sum(drafted) / steps if steps else 0.0,
    )


def stage_shares(runs: Sequence[Run]) -> dict[str, float]:
    """draft, verify and other: their shares of the time inside steps, which add up to 1."""
    totals = {"draft": 0.0, "verify": 0.0, OTHER_STAGES: 0.0}
    for run in runs:
        for stage, seconds in run.stage_seconds.items():
            totals[stage if stage in ("draft", "verify") else OTHER_STAGES] += seconds
    whole = sum(totals.values())
    return {stage: seconds / whole if whole else 0.0 for stage, seconds in totals.items()}


def seat_tokens_per_s(run: Run, keep: Keep) -> float | None:
    """Tokens a second of the kept requests alone: their tokens over the time they held seats, times the seats."""
    kept = [request for request in run.requests if keep(request)]
    seconds = sum(request.seconds for request in kept)
    return run.concurrency * sum(request.num_tokens for request in kept) / seconds if seconds > 0 else None


def median_tpot(run: Run, keep: Keep) -> float | None:
    """Seconds a token behind the first, median over the kept requests."""
    found = [request.tpot for request in run.requests if keep(request) and request.tpot > 0]
    return statistics.median(found) if found else None


def everything(request: RequestRun) -> bool:
    return True


def not_repeating(request: RequestRun) -> bool:
    return not request.repeats


def single(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures of one mode that need no other to compare with."""
    requests = [request for run in runs for request in run.requests]
    return {
        "tokens_per_s": statistics.median(run.tokens_per_s for run in runs),
        "full_batch_tokens_per_s": _median([run.full_batch_tokens_per_s for run in runs]),
        **_request_figures(runs, requests, everything),
        "shares": stage_shares(runs),
        "repeating_share": sum(request.repeats for request in requests) / len(requests),
    }


def compared(pairs: Sequence[Pair]) -> dict[str, Any]:
    """The figures of a mode against off. Ratios above 1 mean that the mode is faster."""
    runs = [pair.on for pair in pairs]
    ratios = [pair.on.tokens_per_s / pair.off.tokens_per_s for pair in pairs]
    without = [pair for pair in pairs if any(not_repeating(request) for request in pair.on.requests)]
    kept = [request for pair in without for request in pair.on.requests if not_repeating(request)]
    found = single(runs) | {
        "pairs": len(pairs),
        "ratios": ratios,
        "ratio": _interval(ratios),
        "tpot_ratio": _interval(_tpot_ratios(pairs, everything)),
        "full_batch_ratio": _interval(
            _ratios([(pair.on.full_batch_tokens_per_s, pair.off.full_batch_tokens_per_s) for pair in pairs])
        ),
        "without_repeats": None,
    }
    if kept:
        found["without_repeats"] = {
            "requests": len(kept),
            "tokens_per_s": _median([seat_tokens_per_s(pair.on, not_repeating) for pair in without]),
            **_request_figures([pair.on for pair in without], kept, not_repeating),
            "ratio": _interval(
                _ratios(
                    [
                        (seat_tokens_per_s(pair.on, not_repeating), seat_tokens_per_s(pair.off, not_repeating))
                        for pair in without
                    ]
                )
            ),
            "tpot_ratio": _interval(_tpot_ratios(without, not_repeating)),
        }
    return found


def ratio_interval(pairs: Sequence[Pair]) -> Interval:
    """tokens/s of the mode over those of off, pair by pair."""
    return median_interval([pair.on.tokens_per_s / pair.off.tokens_per_s for pair in pairs])


def tpot_interval(pairs: Sequence[Pair]) -> Interval | None:
    """TPOT of off over that of the mode, pair by pair: above 1 is faster. None where outputs have one token."""
    ratios = _tpot_ratios(pairs, everything)
    return median_interval(ratios) if ratios else None


def _request_figures(runs: Sequence[Run], requests: Sequence[RequestRun], keep: Keep) -> dict[str, Any]:
    drafts = drafts_of(requests)
    tpot = _median([median_tpot(run, keep) for run in runs])
    return {
        "tpot_ms": None if tpot is None else 1e3 * tpot,
        "acceptance_length": drafts.acceptance_length,
        "acceptance_by_position": list(drafts.by_position),
        "tokens_per_step": drafts.tokens_per_step,
        "drafting_share": drafts.drafting_share,
        "draft_length": drafts.draft_length,
    }


def _tpot_ratios(pairs: Sequence[Pair], keep: Keep) -> list[float]:
    return _ratios([(median_tpot(pair.off, keep), median_tpot(pair.on, keep)) for pair in pairs])


def _ratios(values: Sequence[tuple[float | None, float | None]]) -> list[float]:
    return [over / under for over, under in values if over is not None and under]


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _interval(ratios: Sequence[float]) -> dict[str, float] | None:
    if not ratios:
        return None
    found = median_interval(ratios)
    return {"median": found.median, "low": found.low, "high": found.high}


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals.extend([0] * (len(counts) - len(totals)))
    for i, count in enumerate(counts):
        totals[i] += count
