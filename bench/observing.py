"""Measure what it costs a step to be observed: its record, the metrics, the page's buffer, whatever hears of it.

::

    python -m bench.observing                                        # the default model, 1, 8 and 32 sequences
    python -m bench.observing --batch 4 --json observing.json -- --model FOLDER --num-threads 2

Behind ``--`` come the flags of ``truedraft serve``. The engine's steps run in this thread, one after the other, in
blocks that take turns: in one block each step is observed as it is in a server, in the next it is not. Two numbers come
of it: the share of the step's time that observing took, read off the clock, and how much longer observed blocks were
than their neighbours. Exit code 0: for every number of sequences the share is below ``--limit``, and the blocks do not
contradict it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.engine_here import with_engine_here
from bench.prompts import CHAT, CODE, COPY
from bench.serving_here import settings_of
from bench.speculation.ratios import Interval, median_interval
from model.errors import ModelError
from model.source_error import ModelSourceError
from scheduler.engine import Engine, Step
from scheduler.request import ChoiceSpec, EngineRequest
from scheduler.scheduler import Scheduler
from scheduler.stats import StepRecord
from server.assemble import StartError, build_service
from server.service import Service
from server.settings import Settings, SettingsError
from specdec.params import SamplingParams

BLOCK = 4  # steps, so that what a step leaves in the caches is mostly its own kind's
OUTPUT_TOKENS = 400
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Timed:
    """One step that only decoded; seconds."""

    step: float  # to decide it, to run it and to apply its result
    observing: float  # to make its record and to tell everybody


@dataclass(slots=True)
class Cell:
    """Steps of one number of sequences."""

    num_sequences: int
    observed: list[Timed] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # of an observed block over its neighbour that was not

    @property
    def share(self) -> float:
        """Of the time of observed steps that went into observing."""
        observing = sum(one.observing for one in self.observed)
        return observing / (observing + sum(one.step for one in self.observed))

    @property
    def blocks(self) -> Interval:
        """How many times as long observed blocks were as the others, less 1."""
        found = median_interval(self.ratios)
        return Interval(found.median - 1, found.low - 1, found.high - 1)

    def problem(self, limit: float) -> str | None:
        """What is wrong with it, as a line; None if nothing is."""
        if not self.ratios:
            return f"{self.num_sequences} sequences: nothing was measured"
        if self.share >= limit:
            return f"{self.num_sequences} sequences: observing took {self.share:.2%} of a step; {limit:.2%} are allowed"
        if self.blocks.low >= limit:
            return (
                f"{self.num_sequences} sequences: observed steps were at least {self.blocks.low:.2%} longer "
                f"than others; {limit:.2%} are allowed"
            )
        return None


class Stepper:
    """Runs a service's steps without its event loop, with ``num_sequences`` requests at any time."""

    def __init__(self, service: Service, num_sequences: int, clock: Clock = time.perf_counter) -> None:
        engine = service.engine
        assert isinstance(engine, Engine), "the engine must be in this process"
        assert engine.on_step is not None
        self._hear: Callable[[StepRecord], None] = engine.on_step
        self._scheduler: Scheduler = engine.scheduler
        self._step: Step = engine._step
        self._num_sequences = num_sequences
        self._clock = clock
        self._prompts = _prompts(service)
        self._names = itertools.count()
        most = service.facts.max_model_len
        self._requests = (
            self._request(ids[: most // 2], min(OUTPUT_TOKENS, most - most // 2)) for ids in self._prompts
        )

    def step(self, *, observed: bool) -> Timed | None:
        """The next one; None for one in which a prompt was computed."""
        while self._scheduler.num_running + self._scheduler.num_waiting < self._num_sequences:
            self._scheduler.add(next(self._requests))
        began = self._clock()
        plan = self._scheduler.schedule()
        assert plan is not None
        for seq_id in self._scheduler.take_released():
            self._step.release(seq_id)
        result = self._step.run(plan)
        self._scheduler.apply(plan, result)
        applied = self._clock()
        record = self._scheduler.take_record(result.stats, step_seconds=applied - began)
        if observed:
            self._hear(record)
        ended = self._clock()
        if record.num_prefill_tokens:
            return None
        return Timed(applied - began, ended - applied)

    def close(self) -> None:
        """End all requests."""
        self._scheduler.abort_all()
        for seq_id in self._scheduler.take_released():
            self._step.release(seq_id)

    def _request(self, ids: Sequence[int], max_tokens: int) -> EngineRequest:
        number = next(self._names)
        params = SamplingParams(seed=number, max_tokens=max_tokens, temperature=0.0)
        return EngineRequest(
            f"observed-{self._num_sequences}-{number}", tuple(ids), (ChoiceSpec(0, params),), time.monotonic()
        )


def measure(service: Service, num_sequences: int, pairs: int) -> Cell:
    """``pairs`` of blocks, one observed and one not, in turns; those in which a prompt was computed do not count."""
    cell = Cell(num_sequences)
    stepper = Stepper(service, num_sequences)
    try:
        for number in range(pairs):
            order = (True, False) if number % 2 else (False, True)
            blocks = {observed: [stepper.step(observed=observed) for _ in range(BLOCK)] for observed in order}
            seen, unseen = _whole(blocks[True]), _whole(blocks[False])
            if seen and unseen:
                cell.observed += seen
                took = sum(one.step + one.observing for one in seen)
                cell.ratios.append(took / sum(one.step for one in unseen))
    finally:
        stepper.close()
    return cell


def _whole(block: Sequence[Timed | None]) -> list[Timed]:
    """Empty if one of its steps does not count."""
    steps = [one for one in block if one is not None]
    return steps if len(steps) == len(block) else []


def _prompts(service: Service) -> Iterator[list[int]]:
    texts = [prompt.text for prompt in (*CHAT, *CODE, *COPY)]
    return itertools.cycle([service.tokenizer.encode(text) for text in texts])


def render_seconds(service: Service, times: int = 20) -> float:
    """What one GET /metrics takes of the event loop: the median."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        service.metrics.render()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    try:
        service = build_service(_settings(given[split + 1 :]), lambda line: print(line, file=sys.stderr))
    except (SettingsError, StartError, ModelError, ModelSourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cells = [measure(service, count, options.pairs) for count in options.batch or (1, 8, 32)]
    return report(cells, render_seconds(service), options.limit, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.observing", description=(__doc__ or "").splitlines()[0], epilog="-- flags of serve"
    )
    parser.add_argument("--batch", action="append", type=int, help="sequences that run at one time; may be given again")
    parser.add_argument("--pairs", type=int, default=150, help=f"pairs of blocks of {BLOCK} steps, for each of them")
    parser.add_argument("--limit", type=float, default=0.02, help="largest share of a step's time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results as JSON")
    return parser


def _settings(flags: Sequence[str]) -> Settings:
    return with_engine_here(settings_of(flags), "the steps have to run in this process")


def report(cells: Sequence[Cell], render: float, limit: float, file: Path | None) -> int:
    """Print the table; the exit code."""
    print(f"{'sequences':>9}{'steps':>8}{'step ms':>10}{'observing us':>14}{'share':>9}   observed / not - 1 (95 %)")
    for cell in cells:
        if not cell.ratios:
            continue
        step = statistics.median(one.step for one in cell.observed) * 1e3
        observing = statistics.median(one.observing for one in cell.observed) * 1e6
        blocks = cell.blocks
        print(
            f"{cell.num_sequences:>9}{len(cell.observed):>8}{step:>10.3f}{observing:>14.1f}{cell.share:>9.2%}"
            f"   {blocks.median:+.2%} ({blocks.low:+.2%} to {blocks.high:+.2%})"
        )
    print(f"GET /metrics is written in {render * 1e3:.1f} ms")
    if file is not None:
        rows = [
            {"num_sequences": cell.num_sequences, "share": cell.share, "blocks": asdict(cell.blocks)}
            for cell in cells
            if cell.ratios
        ]
        file.write_text(json.dumps({"limit": limit, "render_seconds": render, "cells": rows}, indent=1), "utf-8")
    problems = [problem for cell in cells if (problem := cell.problem(limit)) is not None]
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
