"""One interleaved run: every peer is up, only one is awake; rounds in rotation, outputs compared as they come."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bench.peers.agreement import Cell, Outputs
from bench.peers.processes import Server, start
from bench.peers.ways import Launch, Way
from bench.serving.loops import LoadResult
from bench.serving.niced import ClientThread
from server.commands import CommandError

T = TypeVar("T")

WARM_TOKENS = 4
WARM_REQUESTS = 2


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """``ids`` are the tokens of ``text``: what it is for peers that take ids."""

    name: str
    text: str
    ids: tuple[int, ...]


@dataclass(slots=True)
class CellResult:
    """What one peer with one kind of speculation did in one cell, round by round."""

    way: Way
    cell: Cell
    launch: Launch
    runs: list[LoadResult] = field(default_factory=list)


@dataclass(slots=True)
class PeersRun:
    """``lost``: peers that could not go on, with the reason; the others did."""

    results: list[CellResult] = field(default_factory=list)
    outputs: Outputs = field(default_factory=Outputs)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    interrupted: bool = False


def rotation(items: Sequence[T], number: int) -> list[T]:
    """The order of round ``number``: every second one runs backwards, so that nobody always comes behind the same one,
    and every pair of rounds begins one further."""
    shift = number // 2 % len(items)
    turned = [*items[shift:], *items[:shift]]
    return turned if number % 2 == 0 else turned[::-1]


def prompts_of_round(num_prompts: int, requests: int, number: int) -> list[int]:
    """Which prompts round ``number`` asks: the next ones in each, from the start again at the end."""
    return [(number * requests + i) % num_prompts for i in range(requests)]


class PeersRunner:
    """``workloads``: prompts by name. ``requests_of``: how many a round has at a concurrency."""

    def __init__(
        self,
        thread: ClientThread,
        ways: Sequence[Way],
        workloads: Mapping[str, Sequence[TokenPrompt]],
        concurrency: Sequence[int],
        *,
        requests_of: Callable[[int], int],
        tokens: int,
        rounds: int,
        folder: Path,
        say: Callable[[str], None],
        start: Callable[[str, Launch, Path, ClientThread], Server] = start,
    ) -> None:
        self._thread = thread
        self._ways = list(ways)
        self._workloads = workloads
        self._concurrency = sorted(concurrency)
        self._requests_of = requests_of
        self._tokens = tokens
        self._rounds = rounds
        self._folder = folder
        self._say = say
        self._start = start
        self._servers: dict[Launch, Server] = {}
        self._started = 0
        self._salt = secrets.token_hex(4)
        self.outcome = PeersRun()

    def run(self) -> PeersRun:
        """What there is comes back after Ctrl-C, too; every process has ended by then."""
        began = time.monotonic()
        try:
            for seats in self._concurrency:
                self._prepare(seats)
                for workload in self._workloads:
                    self._cell(Cell(workload, seats))
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        finally:
            for server in self._servers.values():
                server.process.end()
            self._servers.clear()
        self.outcome.seconds = time.monotonic() - began
        self.outcome.results = [result for result in self.outcome.results if result.runs]
        return self.outcome

    def _prepare(self, seats: int) -> None:
        """Everybody's process for this concurrency is up and asleep; those that nobody needs any more have ended."""
        wanted = {way.launch(seats) for way in self._taking_part()}
        for launch in [launch for launch in self._servers if launch not in wanted]:
            self._servers.pop(launch).process.end()
        for way in self._taking_part():
            launch = way.launch(seats)
            if launch in self._servers:
                continue
            self._say(f"starting {way.name}")
            self._started += 1
            log = self._folder / f"{self._started:02}-{way.peer}-{way.speculation}.log"
            try:
                server = self._servers[launch] = self._start(way.name, launch, log, self._thread)
                self.outcome.versions[way.peer] = server.versions
                for prompts in self._workloads.values():  # every kernel and shape is met before the first round
                    self._load(way, server, prompts, list(range(seats)), 2 * WARM_TOKENS, seats, "start")
                server.process.sleep()
            except CommandError as error:
                if (failed := self._servers.pop(launch, None)) is not None:
                    failed.process.end()
                self._lose(way, str(error))

    def _cell(self, cell: Cell) -> None:
        prompts = self._workloads[cell.workload]
        results = {way.name: CellResult(way, cell, way.launch(cell.seats)) for way in self._taking_part()}
        self.outcome.results += results.values()
        for number in range(self._rounds):
            asked = prompts_of_round(len(prompts), self._requests_of(cell.seats), number)
            for way in rotation(self._ways, number):
                if way.name in self.outcome.lost:
                    continue
                server = self._servers[way.launch(cell.seats)]
                server.process.wake()
                try:
                    # What sleeping left cold is warm again.
                    warm = min(WARM_REQUESTS, cell.seats)
                    self._load(way, server, prompts, asked[:warm], WARM_TOKENS, warm, f"warm-{cell}-{number}")
                    found = self._load(way, server, prompts, asked, self._tokens, cell.seats, f"{cell}-{number}")
                except CommandError as error:
                    self._lose(way, str(error))
                    continue
                finally:
                    server.process.sleep()
                results[way.name].runs.append(found)
                self.outcome.outputs.take(way.peer, way.speculation, cell, asked, found.traces)
                tokens = sum(trace.num_tokens for trace in found.traces if trace.ok)
                self._say(
                    f"{cell.workload}, {cell.seats} at a time, round {number + 1}/{self._rounds}, {way.name}: "
                    f"{tokens / found.duration:.1f} tokens/s"
                )

    def _load(
        self, way: Way, server: Server, prompts: Sequence[TokenPrompt], asked: Sequence[int], tokens: int, seats: int,
        salt: str,
    ) -> LoadResult:  # fmt: skip
        """Raises CommandError if a request was not answered with so many tokens: then nothing can be compared."""
        chosen = [prompts[i % len(prompts)] for i in asked]
        found = server.load(chosen, tokens, seats, way.mode, f"{self._salt}-{salt}-{way.name}")
        for prompt, trace in zip(chosen, found.traces, strict=True):
            if not trace.ok:
                raise CommandError(f"{way.name}: {prompt.name} was not answered: {trace.reason}")
            if trace.num_tokens != tokens:
                raise CommandError(f"{way.name}: {prompt.name} got {trace.num_tokens} tokens instead of {tokens}")
            if trace.num_prompt_tokens not in (0, len(prompt.ids)):
                raise CommandError(
                    f"{way.name}: took {prompt.name} for {trace.num_prompt_tokens} tokens instead of {len(prompt.ids)}"
                )
        return found

    def _taking_part(self) -> list[Way]:
        return [way for way in self._ways if way.name not in self.outcome.lost]

    def _lose(self, way: Way, reason: str) -> None:
        """The run goes on without it, and says so. Its process stays until the next concurrency."""
        self.outcome.lost[way.name] = reason
        self._say(f"going on without {way.name}: {reason}")
