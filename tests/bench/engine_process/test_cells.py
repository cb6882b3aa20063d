"""The comparison's own numbers."""

from __future__ import annotations

import math

from bench.client import RequestTrace
from bench.engine_process.cells import COLUMNS, Round, differences, quantile, rows_of, table
from bench.event_loop.probe import Lag


def trace(*gaps: float, ids: tuple[int, ...] = (1, 2, 3), ttft: float = 0.1) -> RequestTrace:
    return RequestTrace(ttft, ttft + sum(gaps), gaps, len(gaps) + 1, ids, 0, 0, 0)


def one_round(*traces: RequestTrace, wall: float = 1.0, lag: float = 1.0) -> Round:
    return Round(traces, wall, Lag(10, lag, 2 * lag, 3 * lag))


def test_a_cell_has_a_row_for_each_server_and_the_second_is_compared_with_the_first_round_by_round() -> None:
    here = [one_round(trace(0.01, 0.02), wall=1.0), one_round(trace(0.03, 0.04), wall=10.0, lag=5.0)]
    apart = [one_round(trace(0.01, 0.01), wall=2.0), one_round(trace(0.01, 0.01), wall=20.0)]
    first, second = rows_of("streams", 8, here, apart)
    assert (first.engine, first.ratio) == ("here", None)
    assert (second.engine, second.ratio) == ("apart", 0.5)  # whatever the rounds' own speeds
    assert first.tokens_per_second == (3.0 + 0.3) / 2
    assert (first.itl_p50, first.itl_p99, first.itl_max) == (20.0, 30.0, 40.0)
    assert (first.lag_p50, first.lag_p99, first.lag_max) == (3.0, 6.0, 15.0)
    assert math.isclose(first.ttft, 100.0)


def test_every_request_is_compared_token_by_token() -> None:
    same = [one_round(trace(0.1), trace(0.1, ids=(4,)))] * 2
    other = [one_round(trace(0.1), trace(0.1, ids=(5,))), one_round(trace(0.1, ids=()), trace(0.1, ids=(4,)))]
    assert differences(same, same) == (4, 0)
    assert differences(same, other) == (4, 2)


def test_there_are_no_gaps_where_there_was_one_chunk() -> None:
    (row, _) = rows_of("streams", 1, [one_round(trace())], [one_round(trace())])
    assert math.isnan(row.itl_p99)
    assert math.isnan(quantile([], 0.5))


def test_the_table_has_a_line_for_each_row_and_a_cell_for_each_column() -> None:
    rows = rows_of("large", 1, [one_round(trace(0.1))], [one_round(trace(0.1))])
    heading, *lines = table(rows).splitlines()
    assert heading.split("  ")
    assert len(lines) == 2
    assert all(column in heading for column in COLUMNS)
    assert "1.000" in lines[1]
