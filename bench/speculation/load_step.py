"""The controller under a load step: one request, 31 more that come at once and go, one request again."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.offline import Submission
from bench.speculation.modes import BLOCK_SIZE, EngineMaker, Mode
from bench.speculation.runs import Request, Run, StepView, make_requests, num_blocks, run_submissions


@dataclass(frozen=True, slots=True)
class LoadStep:
    """``seats`` requests at its height. The first one goes on throughout, the others come before step ``arrival``."""

    seats: int = 32
    arrival: int = 40
    short_tokens: int = 32
    long_tokens: int = 1000


@dataclass(frozen=True, slots=True)
class Phase:
    """Steps ``first`` .. ``end - 1`` of decoding sequences alone, and the median of their mean draft lengths."""

    name: str
    first: int
    end: int
    draft_length: float


@dataclass(frozen=True, slots=True)
class Found:
    """``None`` for a phase that did not come about."""

    phases: tuple[Phase, ...]
    steps_to_fall: int | None  # from the first step with many, until drafts are nearer to those under load
    steps_to_recover: int | None  # likewise from the first step alone again


def run_load_step(maker: EngineMaker, mode: Mode, prompts: Sequence[tuple[int, ...]], load: LoadStep) -> Run:
    """All on one fresh engine. ``prompts``: at least ``load.seats`` of them."""
    requests = make_requests("load-step", prompts, first=0, count=1, tokens=load.long_tokens, temperature=0.0)
    requests += make_requests(
        "load-step", prompts, first=1, count=load.seats - 1, tokens=load.short_tokens, temperature=0.0
    )
    submissions = [
        Submission(request.token_ids, request.params, salt=request.salt, arrival=load.arrival if number else 0)
        for number, request in enumerate(requests)
    ]
    longest = [Request(r.prompt, r.token_ids, requests[0].params, r.salt) for r in requests[:1]]
    blocks = num_blocks(longest, 1, block_size=BLOCK_SIZE, lookahead=mode.k)
    blocks += num_blocks(requests[1:], load.seats, block_size=BLOCK_SIZE, lookahead=mode.k)
    engine = maker.make(mode, seats=load.seats, num_blocks=blocks)
    run = run_submissions(engine, requests, submissions, load.seats)
    engine.check_clean()
    return run


def mean_draft(step: StepView) -> float:
    """Drafts of a decoding sequence; 0 if none decodes."""
    return statistics.fmean(step.drafts) if step.drafts else 0.0


def examine(steps: Sequence[StepView], load: LoadStep) -> Found:
    """The three phases, and how fast the draft length followed."""
    many = [i for i, step in enumerate(steps) if step.num_decoding > load.seats // 2]
    if not many:
        return Found((), None, None)
    rise, last = many[0], many[-1]
    start = next(i for i, step in enumerate(steps) if step.num_decoding)
    arrived = next(i for i in range(start, rise + 1) if steps[i].num_prefill_rows or steps[i].num_decoding > 1)
    alone = next((i for i in range(last + 1, len(steps)) if steps[i].num_decoding == 1), len(steps))
    phases = [
        _phase("one", steps, start, arrived),
        _phase(f"{load.seats}", steps, rise, last + 1),
        _phase("one again", steps, alone, len(steps)),
    ]
    found = tuple(phase for phase in phases if phase is not None)
    before, under, after = phases
    fall = recover = None
    if before is not None and under is not None:
        fall = _steps_until(steps, rise, under.draft_length, before.draft_length)
    if under is not None and after is not None:
        recover = _steps_until(steps, alone, after.draft_length, under.draft_length)
    return Found(found, fall, recover)


def load_step_table(steps: Sequence[StepView], found: Found, around: int = 6) -> str:
    """The phases, and step by step what happened where the load changes."""
    lines = ["phase        steps        mean drafts of a sequence"]
    lines += [f"{p.name:<11}  {p.first:>4}..{p.end - 1:<5}  {p.draft_length:.2f}" for p in found.phases]
    lines += ["", "step  decoding  prompt rows  mean drafts  most  emitted"]
    shown: set[int] = set()
    for phase in found.phases:
        shown |= set(range(phase.first - 2, phase.first + around))
    previous = None
    for i in sorted(i for i in shown if 0 <= i < len(steps)):
        if previous is not None and i != previous + 1:
            lines.append("  ..")
        step, previous = steps[i], i
        lines.append(
            f"{i:>4}  {step.num_decoding:>8}  {step.num_prefill_rows:>11}  {mean_draft(step):>11.2f}  "
            f"{max(step.drafts, default=0):>4}  {step.num_emitted:>7}"
        )
    lines.append("")
    lines.append(f"steps until drafts were those of the load: {_or_never(found.steps_to_fall)}")
    lines.append(f"steps until they were those of one request again: {_or_never(found.steps_to_recover)}")
    return "\n".join(lines)


def _phase(name: str, steps: Sequence[StepView], first: int, end: int) -> Phase | None:
    if end <= first:
        return None
    return Phase(name, first, end, statistics.median(mean_draft(step) for step in steps[first:end]))


def _steps_until(steps: Sequence[StepView], first: int, new: float, old: float) -> int | None:
    """Steps from ``first`` on, up to the one whose drafts are nearer to the new length than to the old."""
    middle = (new + old) / 2.0
    for count, step in enumerate(steps[first:], start=1):
        length = mean_draft(step)
        if (length <= middle) if new <= old else (length >= middle):
            return count
    return None


def _or_never(count: int | None) -> str:
    return "never" if count is None else str(count)
