"""When refused clients come back: not together, and not before there is room for them."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI
from openai._constants import DEFAULT_MAX_RETRIES, MAX_RETRY_AFTER_DELAY

from server.comeback import (
    KEPT_SHARE,
    LAST_RETRY,
    LATE_SECONDS,
    MAX_SECONDS,
    MAX_SECONDS_OF_PATIENT,
    MIN_SECONDS,
    ComeBack,
    Retries,
    read_retries,
)

PATIENCE = (MAX_SECONDS, MAX_SECONDS_OF_PATIENT)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Outcome:
    lost: int = 0
    refusals: int = 0
    served_at: list[float] = field(default_factory=list)


def simulate(
    clients: int,
    *,
    seats: int,
    room: int,
    seconds: float,
    patience: float = MAX_SECONDS,
    within: float = 1.0,
    late: float = 0.0,
    told: bool = True,
    seed: int = 0,
) -> Outcome:
    """``clients`` come ``within`` so many seconds to a server with so many seats and so much room.

    A request takes ``seconds`` in the mean. Who is refused comes back when it was told to or up to ``late`` seconds
    after that, twice at most; not ``told``: after a second, as a fixed Retry-After says.
    """
    clock, rng, outcome = Clock(), random.Random(seed), Outcome()
    comeback = ComeBack(seats, clock)
    events: list[tuple[float, int, str, int]] = []  # (time, order, what, tries so far)
    for i in range(clients):
        heapq.heappush(events, (rng.random() * within, i, "come", 0))
    order, waiting, running = clients, 0, 0
    while events:
        clock.now, _, what, tries = heapq.heappop(events)
        if what == "end":
            running -= 1
            outcome.served_at.append(clock.now)
        else:
            retries = Retries(tries, patience)
            comeback.saw(waiting, len(outcome.served_at))
            if waiting < ceil(room * (comeback.share(retries) if told else 1)):
                waiting += 1
            else:
                outcome.refusals += 1
                wait = comeback.seconds(retries) if told else 1.0
                assert 0 < wait <= patience
                if tries == LAST_RETRY:
                    outcome.lost += 1
                else:
                    order += 1
                    heapq.heappush(events, (clock.now + wait + rng.random() * late, order, "come", tries + 1))
        while waiting and running < seats:
            waiting, running = waiting - 1, running + 1
            order += 1
            heapq.heappush(events, (clock.now + rng.uniform(0.5, 1.5) * seconds, order, "end", 0))
    return outcome


@pytest.mark.parametrize(
    ("seats", "room", "seconds"),
    [(8, 64, 0.1), (8, 64, 0.25), (32, 64, 1.0), (32, 1024, 1.0), (8, 16, 0.02), (4, 8, 0.05), (16, 256, 0.5)],
)
def test_2000_clients_with_two_retries_are_all_served(seats: int, room: int, seconds: float) -> None:
    outcome = simulate(2000, seats=seats, room=room, seconds=seconds)
    assert (len(outcome.served_at), outcome.lost) == (2000, 0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seats=st.sampled_from((1, 2, 4, 8, 16, 32)),
    room=st.sampled_from((16, 64, 256)),
    exponent=st.floats(-1.5, 1.0),
    patience=st.sampled_from(PATIENCE),
    within=st.sampled_from((0.1, 1.0, 5.0)),
    late=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 99),
)
def test_whatever_the_speed_all_are_served_if_that_takes_a_third_of_what_two_retries_wait(
    seats: int, room: int, exponent: float, patience: float, within: float, late: float, seed: int
) -> None:
    seconds = 10**exponent
    clients = min(1500, int(room + seats + LAST_RETRY * patience / 3 * seats / seconds))
    outcome = simulate(
        clients, seats=seats, room=room, seconds=seconds, patience=patience, within=within, late=late, seed=seed
    )
    assert (len(outcome.served_at), outcome.lost) == (clients, 0)


def test_a_server_that_is_much_slower_than_guessed_loses_nobody() -> None:
    """400 clients, 1.6 requests a second: told by the guess alone the first try of each would be in vain."""
    outcome = simulate(400, seats=8, room=64, seconds=3.0, patience=MAX_SECONDS_OF_PATIENT)
    assert outcome.lost == 0


def test_told_the_same_time_most_would_be_lost() -> None:
    """What the places are for: the simulation can fail."""
    assert simulate(2000, seats=8, room=64, seconds=0.1, told=False).lost > 1000


def test_each_refused_client_is_told_a_later_time_up_to_the_most() -> None:
    comeback = ComeBack(8, Clock())
    times = [comeback.seconds() for _ in range(1000)]
    assert times[0] == MIN_SECONDS
    assert all(earlier < later for earlier, later in pairwise(times[:400]))
    beyond = times[700:]  # more than the longest wait has places for
    assert max(times) <= MAX_SECONDS
    assert min(beyond) >= MAX_SECONDS / 2
    assert len(set(beyond)) == len(beyond)


def test_the_wait_follows_how_fast_requests_end() -> None:
    waits = {}
    for rate in (1, 10, 100):
        clock = Clock()
        comeback = ComeBack(1, clock)
        for second in range(20):
            clock.now = float(second)
            comeback.saw(5, second * rate)
        waits[rate] = [comeback.seconds() for _ in range(10)]
    assert waits[1][-1] > waits[10][-1] > waits[100][-1]


def test_a_server_that_stands_still_makes_clients_wait_longer_and_longer() -> None:
    clock = Clock()
    comeback = ComeBack(64, clock)
    first = [comeback.seconds() for _ in range(10)]
    for second in range(25):
        clock.now = float(second)
        comeback.saw(5, 0)
    later = [comeback.seconds() for _ in range(10)]
    assert first[-1] < later[-1] <= MAX_SECONDS


def test_while_nobody_has_ended_a_round_is_thought_to_take_some_times_as_long_as_that() -> None:
    clock, seats = Clock(), 8
    comeback = ComeBack(seats, clock)
    for second in range(6):
        clock.now = float(second)
        comeback.saw(1, 0)
    assert [comeback.seconds() for _ in range(seats)][-1] > 3 * clock.now


def test_a_queue_that_runs_empty_says_nothing_of_how_fast_it_could_move() -> None:
    waits = []
    for waiting in (0, 5):
        clock = Clock()
        comeback = ComeBack(64, clock)
        for second in range(20):
            clock.now = float(second)
            comeback.saw(waiting, second)
        waits.append([comeback.seconds() for _ in range(10)][-1])
    assert waits[0] < waits[1]


def test_a_quiet_time_makes_the_places_free_again() -> None:
    clock = Clock()
    comeback = ComeBack(8, clock)
    for _ in range(100):
        comeback.seconds()
    clock.now = 1000.0
    assert comeback.seconds() == MIN_SECONDS


def test_a_part_of_the_room_is_for_last_tries_while_some_are_to_come() -> None:
    clock = Clock()
    comeback = ComeBack(8, clock)
    others = [Retries(count) for count in range(LAST_RETRY)]
    assert {comeback.share(each) for each in others} == {1.0}
    wait = comeback.seconds(others[-1])
    assert {comeback.share(each) for each in others} == {1 - KEPT_SHARE}
    assert comeback.share(Retries(LAST_RETRY)) == 1.0
    clock.now = wait + LATE_SECONDS + 0.1
    assert {comeback.share(each) for each in others} == {1.0}


def test_only_the_last_retry_has_room_kept_for_it() -> None:
    comeback = ComeBack(8, Clock())
    for count in (0, LAST_RETRY, LAST_RETRY + 1):
        comeback.seconds(Retries(count))
    assert comeback.share() == 1.0


@pytest.mark.parametrize(
    ("lang", "version", "longest"),
    [
        ("python", "2.52.0", MAX_SECONDS_OF_PATIENT),
        ("python", "3.0.0", MAX_SECONDS_OF_PATIENT),
        ("python", "2.51.0", MAX_SECONDS),
        ("python", "1.99.9", MAX_SECONDS),
        ("js", "6.1.0", MAX_SECONDS),
        ("python", "", MAX_SECONDS),
        ("python", "x.52.1", MAX_SECONDS),
        ("python", "99999999999.0.0", MAX_SECONDS),
        ("python", "³.0.0", MAX_SECONDS),
        (None, None, MAX_SECONDS),
    ],
)
def test_only_clients_known_to_wait_longer_are_told_more_than_a_minute(
    lang: str | None, version: str | None, longest: float
) -> None:
    headers = {"x-stainless-lang": lang, "x-stainless-package-version": version}
    assert read_retries({name: value for name, value in headers.items() if value is not None}) == Retries(0, longest)


@pytest.mark.parametrize(("count", "made"), [("0", 0), ("2", 2), ("-1", 0), ("x", 0), ("9" * 99, 0), ("²", 0)])
def test_the_count_of_retries_is_read_if_it_is_one(count: str, made: int) -> None:
    assert read_retries({"x-stainless-retry-count": count}).num_made == made


def test_openais_client_says_what_is_read_and_waits_as_long_as_is_thought() -> None:
    client = OpenAI(api_key="none", base_url="http://x")
    headers = {name.lower(): str(value) for name, value in client.default_headers.items()}
    assert read_retries(headers).longest_wait == MAX_SECONDS_OF_PATIENT == MAX_RETRY_AFTER_DELAY
    assert LAST_RETRY == DEFAULT_MAX_RETRIES
