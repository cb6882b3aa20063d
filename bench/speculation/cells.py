"""The cells of the comparison and how each is measured: interleaved pairs, and once more if it misses the bar."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.speculation.figures import Pair, ratio_interval, tpot_interval
from bench.speculation.forwards import ForwardTimes
from bench.speculation.modes import BLOCK_SIZE, MAX_BATCHED_TOKENS, OFF, EngineMaker, Mode
from bench.speculation.outputs import Outputs
from bench.speculation.pace import Pace
from bench.speculation.ratios import RERUN_FACTOR, Interval, misses_bar, pair_order
from bench.speculation.runs import Request, Run, closed_loop, closed_loops, make_requests, num_blocks, spread_lengths

LEAST_REQUESTS = 4
WARM_UP_TOKENS = 8

_PLAIN = Mode(OFF, 0)
_ENGINE_SECONDS = 0.5  # a guess of what building an engine takes


@dataclass(frozen=True, slots=True)
class Cell:
    workload: str
    concurrency: int
    temperature: float
    mode: Mode

    def __str__(self) -> str:
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        return f"{self.workload}, concurrency {self.concurrency}, {how}, {self.mode.name}"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run: the least and the most pairs of a cell, output tokens of a request in the mean, requests a
    seat.
    """

    pairs: int
    least_pairs: int
    tokens: int
    requests_per_seat: float

    def requests(self, concurrency: int) -> int:
        """Requests of one run: more than there are seats, so that seats are taken again."""
        return max(LEAST_REQUESTS, round(self.requests_per_seat * concurrency))


@dataclass(slots=True)
class CellResult:
    """``pairs`` is the result that counts; ``first`` are those of a first attempt that missed the bar."""

    cell: Cell
    pairs: list[Pair]
    first: list[Pair] = field(default_factory=list)
    num_different: int = 0
    note: str = ""

    @property
    def held(self) -> bool | None:
        """Is the bar held? None where it does not apply."""
        if not self.cell.mode.adaptive or not self.pairs:
            return None
        tpot = tpot_interval(self.pairs)
        return not (misses_bar(ratio_interval(self.pairs)) or (tpot is not None and misses_bar(tpot)))


@dataclass(frozen=True, slots=True)
class Prompts:
    """One workload, encoded."""

    names: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def mean_length(self) -> float:
        return sum(map(len, self.token_ids)) / len(self.token_ids)


def plan_cells(
    workloads: Sequence[str],
    concurrencies: Callable[[str], Sequence[int]],
    temperatures: Sequence[float],
    modes: Sequence[Mode],
) -> list[Cell]:
    """All cells, mode by mode, so that time that runs out costs the modes at the end."""
    return [
        Cell(workload, concurrency, temperature, mode)
        for mode in modes
        for temperature in temperatures
        for workload in workloads
        for concurrency in concurrencies(workload)
    ]


class CellRunner:
    """Measures cells one after the other. ``results`` holds what there is, also after an interrupt."""

    def __init__(
        self,
        maker: EngineMaker,
        prompts: Mapping[str, Prompts],
        size: Size,
        forwards: ForwardTimes,
        pace: Pace,
        progress: Callable[[str, bool], None] = lambda line, stays: None,
    ) -> None:
        self.outputs = Outputs()
        self.results: list[CellResult] = []
        self.left_out: list[Cell] = []
        self._maker = maker
        self._prompts = prompts
        self._size = size
        self._forwards = forwards
        self._pace = pace
        self._progress = progress
        self._warm: set[Mode] = set()

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure ``cells`` in their order; those for which there is no time go to ``left_out``."""
        gc.collect()
        gc.freeze()  # what is there by now stays: collecting before each run need not look at it again
        try:
            self._run_all(cells)
        finally:
            gc.unfreeze()

    def _run_all(self, cells: Sequence[Cell]) -> None:
        for number, cell in enumerate(cells):
            rest = sum(self._pair_seconds(other) for other in cells[number:])
            pairs = self._pace.pairs(
                self._pair_seconds(cell), rest, wanted=self._size.pairs, least=self._size.least_pairs
            )
            if not pairs:
                self.left_out.append(cell)
                continue
            left = self._pace.expected(rest * pairs)
            where = f"[{number + 1}/{len(cells)}] {cell}"
            self._progress(f"{where}: {pairs} pairs; about {_minutes(left)} for all that is left", True)
            self.measure(cell, pairs, where)

    def measure(self, cell: Cell, pairs: int, where: str = "") -> CellResult:
        """One cell, and once more by the rule for running again: twice the pairs, and that result counts."""
        result = CellResult(cell, [])
        self.results.append(result)
        for mode in (_PLAIN, cell.mode):
            self._warm_up(cell, mode)
        try:
            self._run_pairs(result, pairs, where)
        except KeyboardInterrupt:
            result.note = f"interrupted after {len(result.pairs)} of {pairs} pairs"
            raise
        if result.held is False:
            self._again(result, RERUN_FACTOR * pairs, where)
        self._progress(f"{where}: {_told(result.pairs)} times off", True)
        return result

    def _again(self, result: CellResult, pairs: int, where: str) -> None:
        if not self._pace.fits(pairs * self._pair_seconds(result.cell)):
            result.note = "no time was left to run it again"
            return
        self._progress(f"{where}: {_told(result.pairs)} misses the bar, once more", True)
        result.first, result.pairs = result.pairs, []
        try:
            self._run_pairs(result, pairs, where)
        except KeyboardInterrupt:
            result.first, result.pairs = [], result.first  # half a second attempt is none
            result.note = "interrupted while it ran again"
            raise

    def _run_pairs(self, result: CellResult, pairs: int, where: str) -> None:
        cell = result.cell
        count = self._size.requests(cell.concurrency)
        for number in range(pairs):
            prompts = self._prompts[cell.workload].token_ids
            requests = make_requests(
                cell.workload,
                prompts,
                first=number * count,
                count=count,
                lengths=spread_lengths(len(prompts), self._size.tokens),
                temperature=cell.temperature,
            )
            runs = self._run_pair(cell, pair_order(number, cell.mode.name), requests)
            pair = Pair(runs[OFF], runs[cell.mode.name])
            result.num_different += self._compare(cell, pair)
            result.pairs.append(pair)
            told = _told(result.pairs)
            self._progress(f"{where}: pair {number + 1} of {pairs}, {told} so far", False)

    def _run_pair(self, cell: Cell, order: Sequence[str], requests: Sequence[Request]) -> dict[str, Run]:
        """One run of each mode in ``order``, in turns."""
        started = time.perf_counter()
        blocks = num_blocks(requests, cell.concurrency, block_size=BLOCK_SIZE, lookahead=cell.mode.k)
        engines = [
            self._maker.make(_PLAIN if name == OFF else cell.mode, seats=cell.concurrency, num_blocks=blocks)
            for name in order
        ]
        gc.collect()
        runs = closed_loops(engines, requests, cell.concurrency)
        for engine in engines:
            engine.check_clean()
        self._pace.observe(self._pair_seconds(cell), time.perf_counter() - started)
        return dict(zip(order, runs, strict=True))

    def _warm_up(self, cell: Cell, mode: Mode) -> None:
        """What happens only the first time that a mode runs (code is loaded, memory is touched) is nobody's cost."""
        if mode in self._warm:
            return
        self._warm.add(mode)
        prompts = self._prompts[cell.workload].token_ids[:LEAST_REQUESTS]
        requests = make_requests(
            cell.workload,
            prompts,
            first=0,
            count=len(prompts),
            lengths=[min(WARM_UP_TOKENS, self._size.tokens)] * len(prompts),
            temperature=cell.temperature,
        )
        blocks = num_blocks(requests, LEAST_REQUESTS, block_size=BLOCK_SIZE, lookahead=mode.k)
        closed_loop(self._maker.make(mode, seats=LEAST_REQUESTS, num_blocks=blocks), requests, LEAST_REQUESTS)

    def _compare(self, cell: Cell, pair: Pair) -> int:
        names = self._prompts[cell.workload].names
        before = len(self.outputs.differences)
        for name, run in ((OFF, pair.off), (cell.mode.name, pair.on)):
            for request, ids in zip(run.requests, run.outputs, strict=True):
                key = (cell.workload, cell.temperature, request.prompt)
                if name == OFF:
                    self.outputs.learn(key, ids)
                where = f"{cell}{' (its run without speculation)' if name == OFF else ''}"
                self.outputs.check(key, ids, where=where, prompt=names[request.prompt])
        return len(self.outputs.differences) - before

    def _pair_seconds(self, cell: Cell) -> float:
        return 2.0 * self._run_seconds(cell)

    def _run_seconds(self, cell: Cell) -> float:
        """A guess from the forward times, as if nothing were drafted."""
        count = self._size.requests(cell.concurrency)
        chunk = self._forwards.of_rows(MAX_BATCHED_TOKENS) / MAX_BATCHED_TOKENS
        steps = -(-count // cell.concurrency) * self._size.tokens
        prefill = count * self._prompts[cell.workload].mean_length * chunk
        return _ENGINE_SECONDS + prefill + steps * self._forwards.of_rows(cell.concurrency)


def _told(pairs: Sequence[Pair]) -> str:
    tpot = tpot_interval(pairs)
    return _interval(ratio_interval(pairs)) + ("" if tpot is None else f", by TPOT {_interval(tpot)}")


def _interval(ratio: Interval) -> str:
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _minutes(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )
