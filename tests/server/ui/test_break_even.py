"""The break-even line: exactly where one more draft token begins to bring more tokens a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.ui.break_even import break_even, step_curve

POINTS = [{"rows": rows, "seconds": 0.01 + 0.001 * rows} for rows in (1, 8, 32)]


@given(
    shares=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6).map(lambda found: sorted(found, reverse=True)),
    batch=st.integers(1, 20),
    fixed=st.floats(0.001, 0.1),
    slope=st.floats(0.0001, 0.01),
    round_seconds=st.sampled_from([None, 0.002]),
)
def test_a_share_above_the_line_brings_more_tokens_a_second_and_one_below_fewer(
    shares: list[float], batch: int, fixed: float, slope: float, round_seconds: float | None
) -> None:
    def step(rows: int) -> float:
        return fixed + slope * rows

    costly = None if round_seconds is None else (lambda rows: round_seconds)
    lines = break_even(shares, positions=len(shares), batch=batch, step=step, draft_round=costly)
    for i, line in enumerate(lines, start=1):

        def rate(length: int, last: float, i: int = i) -> float:
            """Tokens a second with so many drafts, the last of them accepted with this share."""
            tokens = 1 + sum(shares[: max(0, length - 1)]) + (last if length else 0.0)
            return batch * tokens / (step(batch * (length + 1)) + length * (round_seconds or 0.0))

        before = rate(i - 1, shares[i - 2] if i > 1 else 0.0)
        assert rate(i, line) == pytest.approx(before)
        assert rate(i, line * 1.01) > before > rate(i, line * 0.99)


def test_behind_what_was_measured_the_line_goes_on_as_if_it_just_paid() -> None:
    lines = break_even([], positions=4, batch=2, step=lambda rows: 0.01 + 0.001 * rows)
    assert lines == pytest.approx([0.002 / 0.012] * 4)


def test_free_rows_pay_always() -> None:
    assert break_even([0.5], positions=3, batch=1, step=lambda rows: 0.01) == [0.0] * 3


@pytest.mark.parametrize("points", [None, [], POINTS[:1], [{"rows": 1, "seconds": 0.0}, {"rows": 2, "seconds": 1.0}]])
def test_what_is_no_curve_is_none(points: list[dict[str, float]] | None) -> None:
    assert step_curve(points) is None


def test_a_curve_goes_through_its_points() -> None:
    curve = step_curve(POINTS)
    assert curve is not None
    assert curve.seconds(20) == pytest.approx(0.03)
