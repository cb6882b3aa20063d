"""Runs the cells: warm-up, rounds in turns, scrapes around each run, outputs compared as they come."""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.serving.engine import Account
from bench.serving.loops import LoadResult, Request, run_load
from bench.serving.niced import ClientThread
from bench.serving.options import Load, Size
from bench.serving.outputs import Agreement
from bench.serving.plan import LoadCell, Results, Variant, requests_of, round_order
from bench.serving.servers import Child
from bench.speculation.pace import Pace
from server.commands import CommandError

WARM_UP_TOKENS = 8
WARM_UP_SEATS = 4


@dataclass(slots=True)
class BenchRun:
    """What there is so far; whole unless ``stopped`` says why it is not."""

    results: list[Results] = field(default_factory=list)
    agreement: Agreement = field(default_factory=Agreement)
    stopped: str = ""
    seconds: float = 0.0
    ended: BaseException | None = None  # the signal that stopped it


class Runner:
    """Measures ``variants`` in every cell. ``children`` are the servers that were started for it, by variant name."""

    def __init__(
        self,
        thread: ClientThread,
        variants: Sequence[Variant],
        cells: Sequence[LoadCell],
        size: Size,
        children: dict[str, Child],
        report: Callable[[str], None],
    ) -> None:
        self._thread = thread
        self._variants = list(variants)
        self._cells = list(cells)
        self._size = size
        self._children = children
        self._report = report
        self._pace = Pace(None)
        self._name = secrets.token_hex(4)  # of this run of the program: salts of earlier ones are others
        self.run_ = BenchRun()

    def run(self) -> BenchRun:
        """Never raises for a signal or a server that dies: what there is comes back."""
        from server.ending import Ended

        outcome = self.run_
        started = time.monotonic()
        gc.freeze()  # what is there by now stays: collections between runs need not look at it
        try:
            for i, cell in enumerate(self._cells):
                self._run_cell(i, cell)
                if outcome.stopped:
                    break
        except (Ended, KeyboardInterrupt) as ended:
            outcome.stopped, outcome.ended = "interrupted", ended
        finally:
            gc.unfreeze()
        outcome.seconds = time.monotonic() - started
        outcome.results = [one for one in outcome.results if one.runs]
        return outcome

    def _run_cell(self, index: int, cell: LoadCell) -> None:
        cost = cell.cost(self._size)
        self._warm_up(cell)
        if index == 0:
            left = self._left(index, 0, cost)
            cells = f"{len(self._cells)} cell{'s' if len(self._cells) > 1 else ''}"
            self._report(f"{cells}, {self._size.rounds} rounds of {self._names()}: about {left}")
        results = {variant.name: Results(cell, variant) for variant in self._variants}
        self.run_.results += results.values()
        for number in range(self._size.rounds):
            for place, variant in enumerate(round_order(self._variants, number)):
                before = time.monotonic()
                found = self._one_run(cell, variant, number, results[variant.name])
                self._pace.observe(cost, time.monotonic() - before)
                done = number * len(self._variants) + place + 1
                self._report(self._line(cell, variant, number, found) + f", {self._left(index, done, cost)} left")
                if not any(trace.ok for trace in found.traces) and (why := self._dead(variant)):
                    self.run_.stopped = f"{cell}, round {number + 1}, {variant.name}: {why}"
                    return

    def _one_run(self, cell: LoadCell, variant: Variant, number: int, into: Results) -> LoadResult:
        salt = f"bench-{self._name}-{cell.workload}-{cell.load.short}-{number}-{variant.name}"
        requests = requests_of(cell, variant, self._size, number, salt)
        found, account = self._thread.run(_measured(variant, requests, cell.load, self._size.seed + number))
        into.runs.append(found)
        if account is not None:
            into.accounts.append(account)
        where = f"{cell}, {variant.name}, round {number + 1}"
        for request, trace in zip(requests, found.traces, strict=False):
            self.run_.agreement.check(request.key, trace, where, into.tally)
        return found

    def _warm_up(self, cell: LoadCell) -> None:
        """Short answers to the cell's own first prompts, by every variant; nothing of it is counted.

        Raises CommandError with the server's words if one of them is refused as wrong.
        """
        seats = min(WARM_UP_SEATS, cell.load.seats or WARM_UP_SEATS)
        size = replace(self._size, tokens=min(WARM_UP_TOKENS, self._size.tokens), requests=seats)
        load = Load(seats=seats)
        short = replace(cell, load=load)
        for variant in self._variants:
            before = time.monotonic()
            salt = f"bench-{self._name}-warm-up-{cell.workload}-{cell.load.short}-{variant.name}"
            requests = requests_of(short, variant, size, 0, salt)
            found, _ = self._thread.run(_measured(variant, requests, load, 0))
            if not any(trace.ok for trace in found.traces):
                reason = found.traces[0].reason if found.traces else "nothing was sent"
                dead = self._dead(variant)
                raise CommandError(f"{variant.name}: the warm-up of {cell} failed: {dead or reason}")
            self._pace.observe(short.cost(size), time.monotonic() - before)

    def _dead(self, variant: Variant) -> str:
        """Why there is no server any more; empty if there is one."""
        child = self._children.get(variant.name)
        if child is not None and child.ended is not None:
            return f"the server ended with exit code {child.ended}; its last lines:\n{child.last_words()}"
        if not self._thread.run(variant.target.alive()):
            return f"the server at {variant.target.client.url} does not answer any more"
        return ""

    def _left(self, index: int, runs_done: int, cost: float) -> str:
        runs = self._size.rounds * len(self._variants)
        units = cost * (runs - runs_done) + sum(runs * cell.cost(self._size) for cell in self._cells[index + 1 :])
        seconds = self._pace.expected(units)
        return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

    def _names(self) -> str:
        return ", ".join(variant.name for variant in self._variants)

    def _line(self, cell: LoadCell, variant: Variant, number: int, found: LoadResult) -> str:
        done = [trace for trace in found.traces if trace.ok]
        rate = sum(trace.num_tokens for trace in done) / found.duration if found.duration > 0 else 0.0
        lost = len(found.traces) - len(done)
        return f"{cell}, round {number + 1}/{self._size.rounds}, {variant.name}: {rate:.1f} tokens/s" + (
            f", {lost} of {len(found.traces)} requests not answered" if lost else ""
        )


async def _measured(
    variant: Variant, requests: Sequence[Request], load: Load, seed: int
) -> tuple[LoadResult, Account | None]:
    target = variant.target
    before = await target.scrape()
    found = await run_load(target.client, target.path, requests, load, seed)
    after = await target.scrape()
    return found, None if before is None or after is None else Account(before, after)
