"""What the load step tells of a controller that follows, and of one that does not."""

from __future__ import annotations

import pytest

from bench.speculation.load_step import LoadStep, examine, load_step_table
from bench.speculation.runs import StepView
from tests.bench.speculation.builders import a_step

LOAD = LoadStep(seats=8)


def steps(fall: int = 2, recover: int = 3, low: int = 0) -> list[StepView]:
    """Drafts of 8 alone and of ``low`` in the batch, after so many steps of the old length."""
    alone = [a_step(0, prefill_rows=50), *[a_step(1, 8)] * 10]
    arriving = [a_step(1, 8, prefill_rows=400), a_step(5, 8, prefill_rows=90)]
    together = [a_step(8, 8)] * (fall - 2) + [a_step(8, low)] * 20
    leaving = [a_step(3, low)]
    again = [a_step(1, low)] * (recover - 1) + [a_step(1, 8)] * 10
    return alone + arriving + together + leaving + again


def test_a_controller_that_follows_falls_and_recovers_within_the_steps_that_it_took() -> None:
    found = examine(steps(fall=4, recover=3), LOAD)
    assert [phase.draft_length for phase in found.phases] == [8.0, 0.0, 8.0]
    # From the first step with more than half the seats: one with 5, two with 8, then the one that is low.
    assert (found.steps_to_fall, found.steps_to_recover) == (4, 3)


def test_the_first_phase_ends_where_the_others_prompts_come() -> None:
    found = examine(steps(), LOAD)
    assert (found.phases[0].first, found.phases[0].end) == (1, 11)


def test_a_controller_that_never_recovers_is_told() -> None:
    many = [*steps()[:34], *[a_step(1, 0)] * 30]
    found = examine(many, LOAD)
    assert found.phases[-1].draft_length == 0.0
    assert found.phases[0].draft_length == 8.0


def test_without_a_load_there_is_nothing_to_tell() -> None:
    assert examine([a_step(1, 4)] * 5, LOAD).phases == ()


def test_the_table_shows_the_phases_and_the_steps_around_the_changes() -> None:
    text = load_step_table(steps(fall=3), examine(steps(fall=3), LOAD))
    assert text.count("..") > 3
    rows = [line.split() for line in text.splitlines()]
    assert ["12", "5", "90", "8.00", "8", "0"] in rows
    assert "one again" in text


@pytest.mark.parametrize(("fall", "expected"), [(2, 2), (5, 5)])
def test_the_steps_are_counted_from_the_first_one_with_many(fall: int, expected: int) -> None:
    assert examine(steps(fall=fall), LOAD).steps_to_fall == expected
