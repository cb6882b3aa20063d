"""The controller under a load step: requests one at a time, 32 at once, one at a time again, on one engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.offline import Submission
from bench.speculation.modes import BLOCK_SIZE, EngineMaker, Mode
from bench.speculation.runs import Request, StepView, make_requests, num_blocks

WINDOW = 8  # steps over which drafts are averaged: a single one says little


@dataclass(frozen=True, slots=True)
class LoadStep:
    """``alone`` requests one after the other, before and after ``seats`` that come at once; ``tokens`` each."""

    seats: int = 32
    alone: int = 4
    tokens: int = 64


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All steps; the crowd comes before step ``rise`` and is gone before step ``fall``."""

    steps: tuple[StepView, ...]
    rise: int
    fall: int
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """Its steps in which the load was as named: the first of them, how many, and drafts of a sequence in the mean."""

    name: str
    first: int
    num_steps: int
    draft_length: float


@dataclass(frozen=True, slots=True)
class Found:
    """Steps from the start of a phase, until drafts over the next ``WINDOW`` are nearer to those of this phase than to
    those of the phase before; None: never."""

    phases: tuple[Phase, ...]
    steps_to_fall: int | None
    steps_to_recover: int | None


def run_load_step(maker: EngineMaker, mode: Mode, prompts: Sequence[tuple[int, ...]], load: LoadStep) -> LoadRun:
    """Greedy, on one fresh engine; each phase has its own salt."""

    def requests(phase: str, first: int, count: int) -> list[Request]:
        lengths = [load.tokens] * len(prompts)
        return make_requests(phase, prompts, first=first, count=count, lengths=lengths, temperature=0.0)

    before, crowd = requests("before", 0, load.alone), requests("crowd", load.alone, load.seats)
    after = requests("after", 0, load.alone)
    blocks = num_blocks([*before, *crowd], load.seats, block_size=BLOCK_SIZE, lookahead=mode.k)
    engine = maker.make(mode, seats=load.seats, num_blocks=blocks)
    outputs: list[tuple[int, ...]] = []

    def run(group: Sequence[Request]) -> None:
        found = engine.run([Submission(one.token_ids, one.params, salt=one.salt) for one in group])
        outputs.extend(done.token_ids for done in found)

    for one in before:
        run([one])
    rise = len(engine.views)
    run(crowd)
    fall = len(engine.views)
    for one in after:
        run([one])
    engine.check_clean()
    return LoadRun(tuple(engine.views), rise, fall, tuple(outputs))


def mean_draft(step: StepView) -> float:
    """Drafts of a decoding sequence; 0 if none decodes."""
    return statistics.fmean(step.drafts) if step.drafts else 0.0


def examine(run: LoadRun, load: LoadStep) -> Found:
    """The three phases, and how fast the draft length followed. Raises ValueError if one did not come about."""
    steps = run.steps
    alone = [i for i in range(run.rise) if steps[i].num_decoding]
    crowd = [i for i in range(run.rise, run.fall) if steps[i].num_decoding > load.seats // 2]
    again = [i for i in range(run.fall, len(steps)) if steps[i].num_decoding]
    if not (alone and crowd and again):
        raise ValueError("the load step has too few decode steps; more tokens are needed")
    one, many, last = (
        Phase(name, where[0], len(where), statistics.fmean(mean_draft(steps[i]) for i in where))
        for name, where in (("one", alone), (str(load.seats), crowd), ("one again", again))
    )
    return Found(
        (one, many, last),
        steps_to_fall=_steps_until([mean_draft(steps[i]) for i in crowd], many.draft_length, one.draft_length),
        steps_to_recover=_steps_until([mean_draft(steps[i]) for i in again], last.draft_length, many.draft_length),
    )


def load_step_table(run: LoadRun, found: Found, around: int = 5) -> str:
    """The phases, and step by step what happened where the load changes."""
    lines = ["phase      decode steps  mean drafts of a sequence"]
    lines += [f"{p.name:<9}  {p.num_steps:>12}  {p.draft_length:.2f}" for p in found.phases]
    lines += ["", "step  decoding  prompt rows  mean drafts  most  emitted"]
    shown: set[int] = set()
    for border in (run.rise, found.phases[1].first, run.fall):
        shown |= set(range(border - around, border + around))
    previous = None
    for i in sorted(i for i in shown if 0 <= i < len(run.steps)):
        if previous is not None and i != previous + 1:
            lines.append("  ..")
        step, previous = run.steps[i], i
        lines.append(
            f"{i:>4}  {step.num_decoding:>8}  {step.num_prefill_rows:>11}  {mean_draft(step):>11.2f}  "
            f"{max(step.drafts, default=0):>4}  {step.num_emitted:>7}"
        )
    lines.append("")
    lines.append(f"steps until drafts were those of the crowd: {_or_never(found.steps_to_fall)}")
    lines.append(f"steps until they were those of one request again: {_or_never(found.steps_to_recover)}")
    return "\n".join(lines)


def _steps_until(lengths: Sequence[float], new: float, old: float) -> int | None:
    middle = (new + old) / 2.0
    for i in range(len(lengths)):
        near = statistics.fmean(lengths[i : i + WINDOW])
        if (near <= middle) if new <= old else (near >= middle):
            return i
    return None


def _or_never(count: int | None) -> str:
    return "never" if count is None else str(count)
