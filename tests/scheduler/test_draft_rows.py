"""Rows that are kept for drafts: prompts do not wait for drafts that nobody verifies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specdec.plan import StepPlan
from tests.scheduler.builders import Bench, build_request, config, prompt


def bench_with_four_decoding(verified: Callable[[int], int]) -> Bench:
    """k = 6 and 40 rows a step; a step verifies ``verified(max_drafts)`` drafts of each sequence."""
    bench = Bench(
        num_blocks=200,
        accept=1.0,
        config=config(max_num_seqs=6, max_num_batched_tokens=40, max_model_len=200, num_speculative_tokens=6),
    )
    run_item = bench.step.run_item

    def limited(item):  # type: ignore[no-untyped-def]
        return run_item(type(item)(item.sequence, item.num_tokens, verified(item.max_drafts)))

    bench.step.run_item = limited  # type: ignore[method-assign]
    for i in range(4):
        bench.add(build_request(f"r{i}", prompt(4, i), max_tokens=150, seed=i))
    for _ in range(3):
        bench.run_step()
    return bench


def granted(plan: StepPlan | None) -> list[int]:
    assert plan is not None
    return [item.max_drafts for item in plan.items if item.num_tokens == 1]


@pytest.mark.parametrize(("verified", "rows"), [(0, 40 - 4 - 4 * 2), (6, 18)])
def test_a_prompt_gets_the_rows_that_drafts_do_not_use(verified: int, rows: int) -> None:
    bench = bench_with_four_decoding(lambda most: min(most, verified))
    assert granted(bench.run_step()) == [6] * 4  # nobody waits
    bench.add(build_request("long", prompt(120, 9), max_tokens=2, seed=9))
    plan = bench.run_step()
    assert plan is not None
    assert max(item.num_tokens for item in plan.items) == rows
    bench.drain()
    bench.check_output("long")


def test_drafts_that_are_verified_get_their_rows_again_within_a_few_steps_though_prompts_wait() -> None:
    now = [0]
    bench = bench_with_four_decoding(lambda most: min(most, now[0]))
    bench.add(build_request("long", prompt(180, 9), max_tokens=2, seed=9))
    assert granted(bench.run_step()) == [2] * 4
    now[0] = 6
    grants = [granted(bench.run_step()) for _ in range(3)]
    assert grants == [[2] * 4, [5, 5, 4, 4], [5, 5, 4, 4]]  # half of the 36 rows
