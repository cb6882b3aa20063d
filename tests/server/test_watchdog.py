"""Who watches the event loop: nothing while it beats, one call when it does not, or when an end takes too long."""

from __future__ import annotations

import threading

import pytest

from server.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(limit=10.0, on_frozen=lambda reason: None, clock=clock)


def test_a_loop_that_beats_is_not_frozen_and_one_that_does_not_is(watchdog: Watchdog, clock: Clock) -> None:
    for _ in range(5):
        clock.now += 9.0
        assert watchdog.reason is None
        watchdog.beat()
    clock.now += 10.5
    assert watchdog.reason == "the event loop has not gone round for 10 seconds"


def test_a_loop_that_has_ended_need_not_beat(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.loop_ended()
    clock.now += 1000.0
    assert watchdog.reason is None


def test_the_earliest_time_to_have_ended_counts(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.loop_ended()
    watchdog.end_within(50.0)
    watchdog.end_within(20.0)
    watchdog.end_within(90.0)
    clock.now += 19.0
    assert watchdog.reason is None
    clock.now += 2.0
    assert watchdog.reason == "the end takes too long"


def test_it_ticks_before_anything_can_go_wrong() -> None:
    ticks: list[int] = []
    watchdog = Watchdog(limit=10.0, on_frozen=lambda reason: None, on_tick=lambda: ticks.append(1), every=3600.0)
    watchdog.start()
    assert ticks == [1]
    watchdog.stop()


def test_it_ticks_until_something_is_wrong_and_says_so_once() -> None:
    clock, ticked, told, frozen = Clock(), threading.Event(), threading.Event(), []

    def on_frozen(reason: str) -> None:
        frozen.append(reason)
        told.set()

    watchdog = Watchdog(limit=10.0, on_frozen=on_frozen, on_tick=ticked.set, every=0.001, clock=clock)
    watchdog.start()
    assert ticked.wait(60)
    assert not frozen
    clock.now += 11.0
    assert told.wait(60)
    ticked.clear()
    watchdog.stop()
    assert len(frozen) == 1
    assert not ticked.is_set()


def test_one_that_was_stopped_or_never_started_says_nothing() -> None:
    clock, frozen = Clock(), []
    watchdog = Watchdog(limit=10.0, on_frozen=frozen.append, every=0.001, clock=clock)
    watchdog.stop()
    started = Watchdog(limit=10.0, on_frozen=frozen.append, every=0.001, clock=clock)
    started.start()
    started.stop()
    clock.now += 11.0
    assert not frozen
