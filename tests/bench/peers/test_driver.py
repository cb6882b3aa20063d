"""The closed loop that runs in a peer's own process, with peers that are scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bench.peers.driver import closed_loop, serve


class Scripted:
    """Every step brings each request its next ids, ``per_step`` at a time: its prompt's first id, counted up."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.per_step: int = settings.get("per_step", 1)
        self.fail_at: int | None = settings.get("fail_at")
        self.running: dict[int, tuple[int, int]] = {}  # next id, ids that are left
        self.most = 0
        self.order: list[int] = []

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        self.running[number] = (prompt[0], tokens)
        self.order.append(number)
        self.most = max(self.most, len(self.running))

    def step(self) -> list[tuple[int, Sequence[int], bool]]:
        found: list[tuple[int, Sequence[int], bool]] = []
        for number, (next_id, left) in list(self.running.items()):
            if number == self.fail_at:
                raise RuntimeError("it fell over")
            count = min(self.per_step, left)
            found.append((number, list(range(next_id, next_id + count)), count == left))
            self.running[number] = (next_id + count, left - count)
            if count == left:
                del self.running[number]
        return found

    def versions(self) -> dict[str, str]:
        return {"scripted": "1"}


def ids_of(trace: dict[str, Any]) -> list[int]:
    return [i for _, ids in trace["chunks"] for i in ids]


@pytest.mark.parametrize("seats", [1, 3, 8])
def test_as_many_run_as_there_are_seats_and_never_more(seats: int) -> None:
    peer = Scripted({})
    closed_loop(peer, [[i] for i in range(8)], 4, seats, 0)
    assert peer.most == seats


@pytest.mark.parametrize("per_step", [1, 3])
def test_each_request_gets_its_own_tokens_and_all_of_them(per_step: int) -> None:
    found = closed_loop(Scripted({"per_step": per_step}), [[10], [20], [30]], 5, 2, 0)
    assert [ids_of(trace) for trace in found["traces"]] == [list(range(p, p + 5)) for p in (10, 20, 30)]


def test_times_of_a_request_are_in_order() -> None:
    found = closed_loop(Scripted({}), [[0], [0], [0]], 3, 1, 0)
    for before, trace in zip([found["started"], *(t["sent"] for t in found["traces"])], found["traces"], strict=False):
        times = [before, trace["sent"], *(time for time, _ in trace["chunks"])]
        assert times == sorted(times)


def asked(settings: dict[str, Any], *loads: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Scripted]]:
    """The answers of a driver, and the peers that it made."""
    answers: list[dict[str, Any]] = []
    made: list[Scripted] = []

    def make(given: dict[str, Any]) -> Scripted:
        made.append(Scripted(given))
        return made[0]

    lines = iter([json.dumps({"backend": "scripted", **settings}), *map(json.dumps, loads)])
    serve(lines, answers.append, {"scripted": make})
    return answers, made


def test_a_driver_says_that_it_is_ready_and_answers_each_load() -> None:
    load = {"prompts": [[5], [7]], "tokens": 2, "seats": 2}
    answers, _ = asked({}, load, load)
    assert answers[0] == {"ready": True, "versions": {"scripted": "1"}}
    assert [[ids_of(trace) for trace in answer["traces"]] for answer in answers[1:]] == [[[5, 6], [7, 8]]] * 2


def test_no_two_requests_of_a_driver_have_the_same_number() -> None:
    load = {"prompts": [[5], [7]], "tokens": 1, "seats": 1}
    _, (peer,) = asked({}, load, load)
    assert peer.order == [0, 1, 2, 3]


def test_a_failure_is_the_drivers_last_answer() -> None:
    answers: list[dict[str, Any]] = []
    lines = iter(['{"backend": "scripted", "fail_at": 0}', '{"prompts": [[5]], "tokens": 1, "seats": 1}'])
    with pytest.raises(RuntimeError):
        serve(lines, answers.append, {"scripted": Scripted})
    assert answers[-1] == {"error": "RuntimeError: it fell over"}
