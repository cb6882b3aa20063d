"""Runs that nobody ran, and a runner that plays them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.speculation.cells import Cell, CellRunner, Prompts, Size
from bench.speculation.forwards import ForwardTimes
from bench.speculation.modes import OFF, EngineMaker, Mode
from bench.speculation.pace import Pace
from bench.speculation.runs import DraftCounts, Request, RequestRun, Run, StepView


def a_request(
    prompt: int = 0,
    *,
    num_tokens: int = 10,
    seconds: float = 1.0,
    tpot: float = 0.1,
    repeats: bool = False,
    steps: Sequence[tuple[int, int]] = (),
) -> RequestRun:
    """``steps``: (drafted, accepted) of each decode step."""
    counts = DraftCounts()
    for drafted, accepted in steps:
        counts.add(drafted, accepted, accepted + 1)
    return RequestRun(prompt, num_tokens, seconds, tpot, repeats, counts)


def a_run(
    requests: Sequence[RequestRun] | None = None,
    *,
    concurrency: int = 1,
    seconds: float = 1.0,
    steps: Sequence[StepView] = (),
    stages: dict[str, float] | None = None,
    outputs: Sequence[tuple[int, ...]] = (),
) -> Run:
    requests = [a_request()] if requests is None else requests
    return Run(concurrency, seconds, tuple(requests), tuple(outputs), tuple(steps), stages or {})


def a_step(
    decoding: int, drafts: int = 0, *, prefill_rows: int = 0, emitted: int = 0, seconds: float = 1.0
) -> StepView:
    """Every decoding sequence has ``drafts`` drafts."""
    return StepView(decoding, prefill_rows, (drafts,) * decoding, emitted, seconds)


class Clock:
    """Stands still unless it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# Mode, number of that mode's run -> tokens/s over those of off; with a second number, TPOT of off over its own.
Speed = Callable[[str, int], float | tuple[float, float]]

SIZE = Size(pairs=3, least_pairs=2, tokens=4, requests_per_seat=2.0)


class PlayedRunner(CellRunner):
    """Runs nothing: ``speed`` says how fast each run was, and every run takes ``seconds`` of the pace's clock."""

    def __init__(self, speed: Speed, *, limit: float | None = None, seconds: float = 1.0, num_prompts: int = 8) -> None:
        self.clock = Clock()
        self.played: list[tuple[str, tuple[int, ...]]] = []  # mode, prompts
        self.change: Callable[[Mode, int, tuple[int, ...]], tuple[int, ...]] = lambda mode, prompt, ids: ids
        self._speed = speed
        self._seconds = seconds
        ids = tuple((i + 1,) * 4 for i in range(num_prompts))
        prompts = Prompts(tuple(f"p{i}" for i in range(num_prompts)), ids)
        super().__init__(
            EngineMaker(None),  # type: ignore[arg-type]  # it makes no engine
            {"chat": prompts, "copy": prompts},
            SIZE,
            ForwardTimes({(1, 1): 0.0625, (512, 1): 0.0625}),
            Pace(limit, self.clock),
        )

    def _warm_up(self, cell: Cell, mode: Mode) -> None:
        pass

    def _run_pair(self, cell: Cell, order: Sequence[str], requests: Sequence[Request]) -> dict[str, Run]:
        runs = {name: self._play(Mode(OFF, 0) if name == OFF else cell.mode, requests) for name in order}
        self._pace.observe(self._pair_seconds(cell), 2.0 * self._seconds)
        return runs

    def _play(self, mode: Mode, requests: Sequence[Request]) -> Run:
        number = sum(name == mode.name for name, _ in self.played)
        self.played.append((mode.name, tuple(request.prompt for request in requests)))
        self.clock.now += self._seconds
        told = 1.0 if mode.name == OFF else self._speed(mode.name, number)
        speed, tpot = told if isinstance(told, tuple) else (told, told)
        outputs = [self.change(mode, request.prompt, (request.prompt, 7)) for request in requests]
        played = [a_request(request.prompt, tpot=0.1 / tpot) for request in requests]
        return a_run(played, seconds=1.0 / speed, outputs=outputs)
