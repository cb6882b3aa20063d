"""The bound on a step's time while others decode: what it lets through, and that it changes no output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.config import SchedulerConfig
from scheduler.pace import LEAST_PROMPT_ROWS, StepPace
from specdec.draft_length.cost import StepCost
from tests.scheduler.builders import Bench, LinearCost, build_request, config, prompt


@given(
    bound=st.floats(1e-4, 10.0),
    points=st.lists(
        st.tuples(st.integers(1, 600), st.floats(1e-4, 5.0)), min_size=2, max_size=6, unique_by=lambda p: p[0]
    ),
    decoding=st.integers(1, 64),
    most=st.integers(64, 700),
)
def test_it_is_the_most_that_fits_but_never_less_than_some(
    bound: float, points: list[tuple[int, float]], decoding: int, most: int
) -> None:
    cost = StepCost(points)
    rows = StepPace(bound, cost).rows(decoding, most)
    least = min(decoding + LEAST_PROMPT_ROWS, most)
    fitting = [n for n in range(least, most + 1) if cost.seconds(n) <= bound]
    assert rows == max(fitting, default=least)


def test_a_bound_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        StepPace(0.0, LinearCost())
    with pytest.raises(ValueError, match="itl_slo must be positive, got -1"):
        SchedulerConfig(itl_slo=-1)


def paced(bound: float) -> tuple[Bench, LinearCost]:
    cost = LinearCost()
    limits = config(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=300, num_speculative_tokens=0)
    return Bench(num_blocks=400, config=limits, pace=StepPace(bound, cost)), cost


def chunks(bench: Bench, name: str) -> list[int]:
    """Rows of the steps in which ``name``'s prompt was computed; it must be the newest one."""
    found = []
    while True:
        plan = bench.run_step()
        assert plan is not None
        rows = [item.num_tokens for item in plan.items if item.num_tokens > 1]
        if not rows:
            return found
        found += rows


@pytest.mark.parametrize(
    ("bound", "rows"),
    [(0.05, [39, 39, 39, 39, 39, 5]), (0.001, [LEAST_PROMPT_ROWS] * 12 + [8]), (9.0, [99, 99, 2])],
)
def test_prompts_beside_a_decoding_sequence_are_cut_to_what_fits(bound: float, rows: list[int]) -> None:
    bench, cost = paced(bound)
    bench.add(build_request("early", prompt(3), max_tokens=100))
    bench.run_step()
    bench.add(build_request("late", prompt(200, 7), max_tokens=2))
    assert chunks(bench, "late") == rows
    assert [seen for seen, _ in cost.seen[1:]][: len(rows)] == [n + 1 for n in rows]
    bench.drain()
    bench.check_output("early")
    bench.check_output("late")


def test_prompts_alone_have_the_whole_budget() -> None:
    bench, _ = paced(0.001)
    bench.add(build_request("long", prompt(250, 7), max_tokens=2))
    assert chunks(bench, "long") == [100, 100, 50]
