"""The clock of one's own: it stands still while others run."""

from __future__ import annotations

from bench.speculation.own_time import OwnTime
from tests.bench.speculation.builders import Clock


def test_it_counts_what_is_spent_inside_and_nothing_else() -> None:
    clock = Clock()
    own = OwnTime(clock)
    clock.now += 5.0
    assert own() == 0.0
    with own.running():
        clock.now += 2.0
        assert own() == 2.0
    clock.now += 7.0
    with own.running():
        clock.now += 1.0
    assert own() == 3.0


def test_it_stops_when_its_owner_fails() -> None:
    clock = Clock()
    own = OwnTime(clock)
    try:
        with own.running():
            clock.now += 2.0
            raise RuntimeError
    except RuntimeError:
        clock.now += 4.0
    assert own() == 2.0
