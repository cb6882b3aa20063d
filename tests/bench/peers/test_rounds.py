"""The interleaved run, with peers that are scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.peers.processes import Process, RoundPrompt
from bench.peers.report import cell_records, comparisons
from bench.peers.rounds import PeersRun, PeersRunner, TokenPrompt, prompts_of_round, rotation
from bench.peers.ways import Launch, Way
from bench.serving.loops import LoadResult
from bench.serving.niced import ClientThread
from bench.serving.options import Mode
from bench.serving.trace import OK, Trace
from server.commands import CommandError

PROMPTS = tuple(TokenPrompt(f"p{i}", f"text {i}", (i, i)) for i in range(4))


@dataclass
class Stage:
    """What all scripted peers share: who is awake, and what happened in which order."""

    awake: set[str] = field(default_factory=set)
    events: list[str] = field(default_factory=list)


class ScriptedProcess(Process):
    def __init__(self, name: str, launch: Launch, stage: Stage) -> None:
        self.name, self.launch, self._stage = name, launch, stage
        stage.awake.add(name)

    def sleep(self) -> None:
        self._stage.awake.discard(self.name)

    def wake(self) -> None:
        self._stage.awake.add(self.name)

    def end(self) -> None:
        self._stage.awake.discard(self.name)
        self._stage.events.append(f"end {self.name}")


class ScriptedServer:
    """Answers a prompt with its number, counted up; ``wrong`` decides who answers otherwise. A request takes
    ``seconds`` for each token."""

    def __init__(self, process: Process, stage: Stage, seconds: float, wrong: Callable[[int, str], bool]) -> None:
        self.process, self.versions = process, {"version": "1"}
        self._stage, self._seconds, self._wrong = stage, seconds, wrong

    def load(self, prompts: Sequence[RoundPrompt], tokens: int, seats: int, mode: Mode, salt: str) -> LoadResult:
        assert self._stage.awake == {self.process.name}
        self._stage.events.append(f"{self.process.name} {mode.name} x{seats} {tokens}")
        traces = []
        for prompt in prompts:
            trace = Trace(prompt.name, planned=0.0, sent=0.0, outcome=OK, reason="")
            first = prompt.ids[0] + 100 * self._wrong(seats, mode.name)
            trace.token_ids = list(range(first, first + tokens))
            trace.chunks = [(self._seconds * (i + 1), 1) for i in range(tokens)]
            trace.ended = trace.chunks[-1][0]
            trace.usage = {"completion_tokens": tokens, "prompt_tokens": len(prompt.ids)}
            traces.append(trace)
        return LoadResult(traces, self._seconds * tokens)


def way(peer: str, speculation: str = "off", *, launch: Callable[[int], Launch] | None = None) -> Way:
    same = Launch((peer, "" if peer == "truedraft" else speculation))
    return Way(peer, speculation, launch or (lambda seats: same), Mode(speculation), True)


def played(
    ways: Sequence[Way],
    *,
    stage: Stage | None = None,
    concurrency: Sequence[int] = (1, 2),
    rounds: int = 2,
    seconds: dict[str, float] | None = None,
    wrong: Callable[[str, int, str], bool] = lambda name, seats, mode: False,
    broken: Sequence[str] = (),
) -> PeersRun:
    stage = stage or Stage()

    def start(name: str, launch: Launch, log: Path, thread: ClientThread) -> Any:
        if name in broken:
            raise CommandError(f"{name} did not get ready")
        process = ScriptedProcess(name, launch, stage)
        took = (seconds or {}).get(name, 1.0)
        return ScriptedServer(process, stage, took, lambda seats, mode: wrong(name, seats, mode))

    with client() as thread:
        return PeersRunner(
            thread,
            ways,
            {"w": PROMPTS},
            concurrency,
            requests_of=lambda seats: 4,
            tokens=8,
            rounds=rounds,
            folder=Path(),
            say=lambda line: None,
            start=start,
        ).run()


@contextlib.contextmanager
def client() -> Iterator[ClientThread]:
    with ClientThread(0) as thread:
        yield thread


def test_only_the_peer_that_is_loaded_is_awake() -> None:
    stage = Stage()  # every load asserts it
    played([way("truedraft"), way("a"), way("b")], stage=stage)
    assert stage.awake == set()


def test_every_peer_runs_as_often_in_every_cell() -> None:
    run = played([way("truedraft"), way("a"), way("a", "ngram")], rounds=3)
    assert {(r.way.name, r.cell.seats): len(r.runs) for r in run.results} == {
        (name, seats): 3 for name in ("truedraft, off", "a, off", "a, ngram") for seats in (1, 2)
    }


def test_kinds_of_speculation_that_share_a_process_share_it() -> None:
    stage = Stage()
    played([way("truedraft"), way("truedraft", "auto"), way("a")], stage=stage)
    assert sorted(event for event in stage.events if event.startswith("end")) == ["end a, off", "end truedraft, off"]


def test_a_process_whose_flags_hang_on_the_concurrency_is_replaced_and_the_others_stay() -> None:
    stage = Stage()
    played([way("truedraft"), way("a", launch=lambda seats: Launch(("a", str(seats))))], stage=stage)
    first_end = stage.events.index("end a, off")
    assert all(" x1 " in event for event in stage.events[:first_end])
    assert stage.events.count("end a, off") == 2
    assert stage.events.count("end truedraft, off") == 1


def test_a_peer_that_does_not_start_is_lost_with_its_reason_and_the_others_run() -> None:
    run = played([way("truedraft"), way("a"), way("b")], broken=["a, off"])
    assert run.lost == {"a, off": "a, off did not get ready"}
    assert {r.way.peer for r in run.results} == {"truedraft", "b"}


def test_too_few_tokens_lose_a_peer_since_speeds_of_other_lengths_say_nothing() -> None:
    class Short(ScriptedServer):
        def load(self, prompts: Sequence[RoundPrompt], tokens: int, seats: int, mode: Mode, salt: str) -> LoadResult:
            return super().load(prompts, tokens - 1, seats, mode, salt)

    stage = Stage()

    def start(name: str, launch: Launch, log: Path, thread: ClientThread) -> Any:
        made = Short if name == "a, off" else ScriptedServer
        return made(ScriptedProcess(name, launch, stage), stage, 1.0, lambda seats, mode: False)

    with client() as thread:
        run = PeersRunner(
            thread, [way("truedraft"), way("a")], {"w": PROMPTS}, [1], requests_of=lambda seats: 4, tokens=8,
            rounds=1, folder=Path(), say=lambda line: None, start=start,
        ).run()  # fmt: skip
    assert "tokens instead of" in run.lost["a, off"]
    assert {r.way.peer for r in run.results} == {"truedraft"}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_over_two_turns_nobody_is_favoured_by_the_order(count: int) -> None:
    orders = [rotation(range(count), number) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    places = {who: sum(order.index(who) for order in orders) for who in range(count)}
    assert len(set(places.values())) == 1


def test_nobody_always_comes_behind_the_same_one() -> None:
    orders = [rotation(range(4), number) for number in range(2)]
    before = [{who: order[i - 1] for i, who in enumerate(order) if i} for order in orders]
    assert all(before[0].get(who) != before[1].get(who) for who in range(4))


def test_rounds_ask_the_next_prompts_and_all_of_them() -> None:
    assert [prompts_of_round(4, 3, number) for number in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def records(run: PeersRun) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {(r["peer"], r["speculation"], r["max_concurrency"]): r for r in cell_records(run)}


def test_outputs_that_speculation_changes_are_counted() -> None:
    run = played(
        [way("truedraft"), way("a"), way("a", "ngram")],
        wrong=lambda name, seats, mode: name == "a, ngram" and seats == 2,
    )
    found = records(run)
    assert found["a", "ngram", 1]["equal_without_speculation"] == {"equal": 4, "compared": 4}
    assert found["a", "ngram", 2]["equal_without_speculation"] == {"equal": 0, "compared": 4}
    assert found["a", "off", 2]["equal_without_speculation"] is None


def test_outputs_that_the_batch_changes_are_counted() -> None:
    run = played([way("truedraft"), way("a")], wrong=lambda name, seats, mode: name == "a, off" and seats == 2)
    found = records(run)
    assert found["a", "off", 2]["equal_alone"] == {"equal": 0, "compared": 4}
    assert found["truedraft", "off", 2]["equal_alone"] == {"equal": 4, "compared": 4}
    assert found["a", "off", 1]["equal_alone"] is None


def test_a_peer_with_other_weights_shows_in_how_early_it_leaves_ours() -> None:
    run = played([way("truedraft"), way("a"), way("b")], wrong=lambda name, seats, mode: name == "b, off")
    found = records(run)
    assert found["a", "off", 1]["common_start_with_ours"] == 8
    assert found["b", "off", 1]["common_start_with_ours"] == 0


def test_ratios_are_against_the_fastest_peer_of_each_kind() -> None:
    run = played(
        [way("truedraft"), way("a"), way("b"), way("b", "ngram")],
        seconds={"truedraft, off": 1.0, "a, off": 2.0, "b, off": 3.0, "b, ngram": 0.5},
        concurrency=[2],
    )
    found = {c["against"]: c for c in comparisons(cell_records(run))}
    assert (found["plain"]["peer"], found["plain"]["ratio"]) == ("a", pytest.approx(2.0))
    assert (found["best"]["peer_speculation"], found["best"]["ratio"]) == ("ngram", pytest.approx(0.5))
    assert found["plain"]["mean_ttft_ms_ratio"] == pytest.approx(0.5)


def test_a_result_has_the_field_names_of_vllms_benchmark() -> None:
    run = played([way("truedraft")], concurrency=[1])
    (record,) = cell_records(run)
    assert record.keys() >= {"output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "mean_tpot_ms"}
    assert record["output_throughput"] == pytest.approx(4.0)  # four requests of a second a token, all at once
