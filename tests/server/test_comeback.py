"""When refused clients come back: not together, and not before there is room for them."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from server.comeback import MAX_SECONDS, MIN_SECONDS, ComeBack
from server.service import GUESSED_ROUNDS

RETRIES = 2  # of OpenAI's clients


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Outcome:
    served: int = 0
    lost: int = 0
    refusals: int = 0


def simulate(clients: int, *, seats: int, room: int, seconds: float, told: bool = True, seed: int = 0) -> Outcome:
    """``clients`` come within a second to a server with so many seats and so much room.

    A request takes ``seconds`` in the mean. Who is refused comes back when it was told to, twice at most; not ``told``:
    after a second, as a fixed Retry-After says.
    """
    clock, rng, outcome = Clock(), random.Random(seed), Outcome()
    comeback = ComeBack(GUESSED_ROUNDS * seats, clock)
    events: list[tuple[float, int, str, int]] = []  # (time, order, what, tries so far)
    for i in range(clients):
        heapq.heappush(events, (rng.random(), i, "come", 0))
    order, waiting, running, left = clients, 0, 0, 0
    while events:
        clock.now, _, what, tries = heapq.heappop(events)
        if what == "end":
            running -= 1
            outcome.served += 1
        else:
            comeback.saw(waiting, left)
            if waiting < room:
                waiting += 1
            else:
                outcome.refusals += 1
                wait = comeback.seconds() if told else 1.0
                if tries == RETRIES:
                    outcome.lost += 1
                else:
                    order += 1
                    heapq.heappush(events, (clock.now + wait, order, "come", tries + 1))
        while waiting and running < seats:
            waiting, running, left = waiting - 1, running + 1, left + 1
            order += 1
            heapq.heappush(events, (clock.now + rng.uniform(0.5, 1.5) * seconds, order, "end", 0))
    return outcome


@pytest.mark.parametrize(
    ("seats", "room", "seconds"),
    [(8, 64, 0.1), (8, 64, 0.25), (32, 64, 1.0), (32, 1024, 1.0), (8, 16, 0.02), (4, 8, 0.05), (16, 256, 0.5)],
)
def test_2000_clients_with_two_retries_are_all_served(seats: int, room: int, seconds: float) -> None:
    outcome = simulate(2000, seats=seats, room=room, seconds=seconds)
    assert (outcome.served, outcome.lost) == (2000, 0)


def test_told_the_same_time_most_would_be_lost() -> None:
    """What the places are for: the simulation can fail."""
    assert simulate(2000, seats=8, room=64, seconds=0.1, told=False).lost > 1000


def test_each_refused_client_is_told_a_later_time_up_to_the_most() -> None:
    clock = Clock()
    comeback = ComeBack(10, clock)
    times = [comeback.seconds() for _ in range(1000)]
    assert times[0] == MIN_SECONDS
    assert all(earlier < later for earlier, later in pairwise(times[:400]))
    beyond = times[600:]  # more than the longest wait has places for
    assert max(times) <= MAX_SECONDS
    assert min(beyond) >= MAX_SECONDS / 2
    assert len(set(beyond)) == len(beyond)


def test_the_wait_follows_how_fast_the_queue_moves() -> None:
    waits = {}
    for rate in (1, 10, 100):
        clock = Clock()
        comeback = ComeBack(1, clock)
        for second in range(20):
            clock.now = float(second)
            comeback.saw(5, second * rate)
        waits[rate] = [comeback.seconds() for _ in range(10)]
    assert waits[1][-1] > waits[10][-1] > waits[100][-1]


def test_a_queue_that_stands_still_makes_clients_wait_longer_and_longer() -> None:
    clock = Clock()
    comeback = ComeBack(100, clock)
    first = [comeback.seconds() for _ in range(10)]
    for second in range(25):
        clock.now = float(second)
        comeback.saw(5, 0)
    later = [comeback.seconds() for _ in range(10)]
    assert first[-1] < later[-1] <= MAX_SECONDS


def test_a_queue_that_runs_empty_says_nothing_of_how_fast_it_could_move() -> None:
    waits = []
    for waiting in (0, 5):
        clock = Clock()
        comeback = ComeBack(100, clock)
        for second in range(20):
            clock.now = float(second)
            comeback.saw(waiting, second)
        waits.append([comeback.seconds() for _ in range(10)][-1])
    assert waits[0] < waits[1]


def test_a_quiet_time_makes_the_places_free_again() -> None:
    clock = Clock()
    comeback = ComeBack(10, clock)
    for _ in range(100):
        comeback.seconds()
    clock.now = 1000.0
    assert comeback.seconds() == MIN_SECONDS
