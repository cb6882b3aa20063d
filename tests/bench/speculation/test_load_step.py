"""What the load step tells of a controller that follows, and of one that does not."""

from __future__ import annotations

import pytest

from bench.speculation.load_step import LoadRun, LoadStep, examine, load_step_table
from tests.bench.speculation.builders import a_step

LOAD = LoadStep(seats=8)


def a_load_run(fall: int = 0, recover: int = 0, low: int = 0) -> LoadRun:
    """Drafts of 8 alone and of ``low`` in the crowd, each after so many steps of what was before."""
    alone = [a_step(0, prefill_rows=50), *[a_step(1, 8)] * 10]
    crowd = [a_step(0, prefill_rows=400), a_step(3, 8, prefill_rows=300)]
    crowd += [a_step(8, 8)] * fall + [a_step(8, low)] * 40 + [a_step(2, low)] * 5
    again = [a_step(0, prefill_rows=50), *[a_step(1, low)] * recover, *[a_step(1, 8)] * 40]
    return LoadRun((*alone, *crowd, *again), len(alone), len(alone) + len(crowd), ())


def test_the_phases_are_the_steps_in_which_the_load_is_as_named() -> None:
    found = examine(a_load_run(), LOAD)
    assert [(phase.first, phase.num_steps, phase.draft_length) for phase in found.phases] == [
        (1, 10, 8.0),
        (13, 40, 0.0),
        (59, 40, 8.0),
    ]


def test_a_controller_that_follows_at_once_needs_no_step() -> None:
    found = examine(a_load_run(), LOAD)
    assert (found.steps_to_fall, found.steps_to_recover) == (0, 0)


@pytest.mark.parametrize("late", [6, 12, 20])
def test_one_that_is_late_is_told_by_how_much(late: int) -> None:
    found = examine(a_load_run(fall=late, recover=late), LOAD)
    # The window of 8 steps turns when it holds about as many new ones as old ones.
    assert found.steps_to_fall is not None
    assert found.steps_to_recover is not None
    assert late - 5 <= found.steps_to_fall <= late
    assert late - 5 <= found.steps_to_recover <= late


def test_one_that_does_not_follow_shows_the_same_drafts_in_every_phase() -> None:
    found = examine(a_load_run(low=8), LOAD)
    assert [phase.draft_length for phase in found.phases] == [8.0, 8.0, 8.0]


def test_a_phase_that_did_not_come_about_is_an_error() -> None:
    with pytest.raises(ValueError, match="more tokens"):
        examine(LoadRun((a_step(1, 4),) * 5, 2, 3, ()), LOAD)


def test_the_table_shows_the_phases_and_the_steps_around_the_changes() -> None:
    run = a_load_run(fall=2)
    lines = load_step_table(run, examine(run, LOAD)).splitlines()
    rows = [line.split() for line in lines]
    assert ["12", "3", "300", "8.00", "8", "0"] in rows
    assert sum(line.strip() == ".." for line in lines) == 1
    assert sum(line.startswith("one again") for line in lines) == 1
