"""How a cell is measured: pairs, prompts, the rule for running again, time, differences, interrupts."""

from __future__ import annotations

import pytest

from bench.speculation.cells import Cell, plan_cells
from bench.speculation.modes import Mode
from bench.speculation.pace import Pace
from tests.bench.speculation.builders import SIZE, Clock, PlayedRunner

AUTO, NGRAM = Mode("auto", 16), Mode("ngram", 4)


def cell(mode: Mode = AUTO, concurrency: int = 1) -> Cell:
    return Cell("chat", concurrency, 0.0, mode)


def test_off_and_the_mode_run_in_turn_on_the_same_prompts_in_alternating_order() -> None:
    runner = PlayedRunner(lambda mode, number: 1.2)
    runner.measure(cell(concurrency=2), 3)
    assert [mode for mode, _ in runner.played] == ["off", "auto", "auto", "off", "off", "auto"]
    prompts = [prompts for _, prompts in runner.played]
    assert prompts[::2] == prompts[1::2] == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]


def test_a_cell_that_misses_the_bar_runs_once_more_with_twice_the_pairs_and_that_counts() -> None:
    runner = PlayedRunner(lambda mode, number: 0.9 if number < 3 else 1.1)
    found = runner.measure(cell(), 3)
    assert (len(found.first), len(found.pairs)) == (3, 6)
    assert found.held is True


def test_a_cell_that_misses_the_bar_twice_has_missed_it() -> None:
    runner = PlayedRunner(lambda mode, number: 0.9)
    found = runner.measure(cell(), 3)
    assert (len(found.first), len(found.pairs), found.held) == (3, 6, False)


@pytest.mark.parametrize("speeds", [(0.9, 1.2), (1.2, 0.9)])
def test_the_bar_is_for_tokens_a_second_and_for_the_time_of_a_token(speeds: tuple[float, float]) -> None:
    runner = PlayedRunner(lambda mode, number: speeds)
    found = runner.measure(cell(), 3)
    assert (len(found.first), len(found.pairs), found.held) == (3, 6, False)


def test_a_lucky_second_try_is_not_sought_where_the_bar_is_held_or_does_not_apply() -> None:
    held = PlayedRunner(lambda mode, number: 0.98)
    assert len(held.measure(cell(), 3).pairs) == 3
    other = PlayedRunner(lambda mode, number: 0.5)
    found = other.measure(cell(NGRAM), 3)
    assert (len(found.pairs), found.first, found.held) == (3, [], None)


def test_without_time_to_run_again_the_first_result_stands_and_says_so() -> None:
    runner = PlayedRunner(lambda mode, number: 0.9, limit=8.0)
    found = runner.measure(cell(), 3)
    assert (len(found.pairs), found.first, found.held) == (3, [], False)
    assert "no time" in found.note


def test_an_output_that_differs_from_plain_decoding_is_counted_and_placed() -> None:
    runner = PlayedRunner(lambda mode, number: 1.0)
    runner.change = lambda mode, prompt, ids: (ids[0], 8) if mode == AUTO and prompt == 2 else ids
    found = runner.measure(cell(), 2)
    assert found.num_different == len(runner.outputs.differences) == 1
    (difference,) = runner.outputs.differences
    assert (difference.prompt, difference.output_index, difference.expected, difference.got) == ("p2", 1, 7, 8)
    assert "auto" in str(difference)


def test_an_output_that_changes_between_two_runs_without_speculation_is_a_difference() -> None:
    runner = PlayedRunner(lambda mode, number: 1.0, num_prompts=4)
    runner.change = lambda mode, prompt, ids: (*ids, 9) if len(runner.played) > 4 else ids
    runner.measure(cell(NGRAM), 3)
    assert any("its run without" in difference.where for difference in runner.outputs.differences)


def test_an_interrupt_keeps_the_pairs_that_are_done() -> None:
    runner = PlayedRunner(_interrupt_at(2))
    with pytest.raises(KeyboardInterrupt):
        runner.run([cell(NGRAM)])
    (found,) = runner.results
    assert len(found.pairs) == 1
    assert "1 of 3" in found.note


def test_an_interrupt_of_the_second_attempt_leaves_the_first() -> None:
    runner = PlayedRunner(_interrupt_at(4, otherwise=0.9))
    with pytest.raises(KeyboardInterrupt):
        runner.run([cell()])
    (found,) = runner.results
    assert (len(found.pairs), found.first, found.held) == (3, [], False)


def _interrupt_at(count: int, otherwise: float = 1.0):  # type: ignore[no-untyped-def]
    def speed(mode: str, number: int) -> float:
        if number == count - 1:
            raise KeyboardInterrupt
        return otherwise

    return speed


def test_time_that_runs_out_costs_pairs_first_and_then_the_cells_at_the_end() -> None:
    # 2 s a pair: 13 s are 6 pairs, so 2 for each of 3 cells; the fourth is left out.
    cells = [cell(), cell(NGRAM), Cell("copy", 1, 0.0, AUTO), Cell("copy", 1, 0.0, NGRAM)]
    runner = PlayedRunner(lambda mode, number: 1.0, limit=13.0)
    runner.run(cells)
    assert [(result.cell, len(result.pairs)) for result in runner.results] == [(each, 2) for each in cells[:3]]
    assert runner.left_out == cells[3:]
    assert runner.clock.now <= 13.0


def test_with_time_enough_every_cell_has_all_its_pairs() -> None:
    runner = PlayedRunner(lambda mode, number: 1.0, limit=1000.0)
    runner.run([cell(), cell(NGRAM)])
    assert [len(result.pairs) for result in runner.results] == [SIZE.pairs] * 2


def test_estimates_follow_what_the_runs_took() -> None:
    clock = Clock()
    pace = Pace(100.0, clock)
    assert pace.expected(10.0) == 10.0
    pace.observe(1.0, 4.0)
    assert pace.expected(10.0) == 40.0
    clock.now = 61.0
    assert not pace.fits(10.0)
    assert pace.fits(9.0)
    assert pace.pairs(1.0, 3.0, wanted=7, least=2) == 3
    assert pace.pairs(5.0, 50.0, wanted=7, least=2) == 0


def test_a_run_has_more_requests_than_seats() -> None:
    assert [SIZE.requests(concurrency) for concurrency in (1, 3, 32)] == [4, 6, 64]


def test_cells_come_mode_by_mode_and_each_workload_has_its_own_concurrencies() -> None:
    cells = plan_cells(["chat", "copy"], lambda name: [1, 8] if name == "copy" else [1], [0.0, 0.8], [AUTO, NGRAM])
    assert len(cells) == len(set(cells)) == 12
    assert {each.mode for each in cells[:6]} == {AUTO}
    assert {each.concurrency for each in cells if each.workload == "chat"} == {1}
