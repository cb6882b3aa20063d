"""Intervals, pairs, the bar, the bound, repeated 8-grams."""

from __future__ import annotations

import statistics

import pytest

from bench.speculation.forwards import ForwardTimes, shapes_for
from bench.speculation.ratios import Interval, bound, median_interval, misses_bar, pair_order
from bench.speculation.repeats import repeating_share, repeats_itself


def test_the_interval_is_the_same_for_the_same_values_and_holds_the_median() -> None:
    values = [1.02, 0.97, 1.11, 1.3, 0.95, 1.05, 1.04]
    found = median_interval(values)
    assert found == median_interval(values)
    assert found.median == statistics.median(values)
    assert min(values) <= found.low < found.median < found.high <= max(values)


def test_the_interval_is_that_of_the_bootstrapped_median() -> None:
    # Of two values, a quarter of the draws holds only the lower one: more than 2.5 %.
    assert median_interval([1.0, 2.0]) == Interval(1.5, 1.0, 2.0)
    # Of seven, the median falls below the second lowest with less than 2.5 %, and below the third lowest with more.
    found = median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert (found.low, found.high) == (2.0, 6.0)


def test_values_that_agree_leave_no_doubt() -> None:
    assert median_interval([1.2] * 5) == Interval(1.2, 1.2, 1.2)


def test_the_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        median_interval([])


def test_who_runs_first_alternates() -> None:
    assert [pair_order(i, "auto") for i in range(3)] == [("off", "auto"), ("auto", "off"), ("off", "auto")]


@pytest.mark.parametrize(
    ("median", "low", "missed"), [(0.97, 0.94, False), (0.969, 0.96, True), (1.3, 0.939, True), (1.0, 0.99, False)]
)
def test_the_bar_asks_for_the_median_and_for_the_lower_end(median: float, low: float, missed: bool) -> None:
    assert misses_bar(Interval(median, low, 2.0)) is missed


def test_the_bound_is_what_full_acceptance_at_no_cost_would_gain() -> None:
    assert bound(4, seconds=0.010, verify_seconds=0.020) == pytest.approx(2.5)
    times = ForwardTimes({(2, 1): 0.010, (2, 5): 0.020, (2, 9): 0.022, (2, 17): 0.100, (3, 1): 0.011})
    assert times.bound(2, 4) == pytest.approx(2.5)
    assert times.bound(3, 4) is None
    assert times.best_bound(2, 16) == (pytest.approx(9 * 0.010 / 0.022), 8)
    assert times.best_bound(2, 4) == (pytest.approx(2.5), 4)
    assert times.best_bound(3, 16) is None


def test_times_between_the_measured_shapes_are_linear_and_beyond_proportional() -> None:
    times = ForwardTimes({(1, 1): 1.0, (4, 1): 2.0, (4, 2): 3.0})
    assert [times.of_rows(rows) for rows in (1, 4, 6, 8, 16)] == [1.0, 2.0, 2.5, 3.0, 6.0]


def test_no_shape_has_more_rows_than_a_step() -> None:
    assert shapes_for([16, 1], [4, 16], max_rows=100) == [(1, 1), (1, 5), (1, 17), (16, 1), (16, 5)]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((), False),
        (range(100), False),
        ([*range(8), 50, *range(8)], True),
        ([*range(7), 50, *range(7)], False),
        ([5] * 8, False),
        ([5] * 9, True),  # the two overlap
        ([1, 2, 3] * 4, True),
    ],
)
def test_an_output_repeats_itself_if_eight_tokens_in_a_row_come_twice(ids: list[int], expected: bool) -> None:
    assert repeats_itself(list(ids)) is expected


def test_the_share_counts_outputs() -> None:
    assert repeating_share([[5] * 9, list(range(30)), list(range(9)), [1, 2] * 6]) == 0.5
    assert repeating_share([]) == 0.0
