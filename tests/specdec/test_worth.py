"""Whether asking for drafts pays at all: an account of what they brought and what they cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_length.controller import Ask, DraftLengthController
from specdec.draft_length.cost import StepCost
from specdec.draft_length.worth import MOST_SKIPPED, Worth
from specdec.drafters.draft import Draft

STEP = 0.02
LINEAR = StepCost([(1, 0.01), (101, 1.01)])  # 10 ms a row: a row is as dear as the token that it may bring
FLAT = StepCost([(1, 0.01), (101, 0.0101)])


def asked(worth: Worth, steps: int, net: Callable[[int], float], step: float = STEP) -> list[bool]:
    found = []
    for i in range(steps):
        found.append(worth.asking())
        if found[-1]:
            gained = net(i)
            worth.observe(max(gained, 0.0), max(-gained, 0.0), step)
    return found


def test_who_only_loses_is_asked_in_one_of_eight_steps() -> None:
    found = asked(Worth(), 800, lambda i: -0.05 * STEP)
    assert sum(found[80:]) == pytest.approx(720 / (MOST_SKIPPED + 1), abs=2)


def test_who_gains_is_asked_in_every_step() -> None:
    assert all(asked(Worth(), 200, lambda i: 0.01 * STEP))


def test_what_hardly_costs_anything_is_asked_in_every_step() -> None:
    assert all(asked(Worth(), 200, lambda i: -0.002 * STEP))


def test_a_long_gain_does_not_pay_for_a_long_loss() -> None:
    worth = Worth()
    asked(worth, 10_000, lambda i: 0.5 * STEP)
    assert asked(worth, 100, lambda i: -0.05 * STEP).count(False) > 50


def test_a_long_loss_is_over_with_one_good_draft_once_a_token_is_worth_a_step() -> None:
    worth = Worth()
    asked(worth, 10_000, lambda i: -0.5 * STEP)
    found = asked(worth, 2 * (MOST_SKIPPED + 1), lambda i: STEP / 4, step=STEP / 4)
    assert all(found[MOST_SKIPPED + 1 :])


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(1e-6, 10)), max_size=60))
def test_it_asks_again_within_eight_steps_whatever_came(steps: list[tuple[float, float, float]]) -> None:
    worth = Worth()
    for gained, spent, step in steps:
        skipped = 0
        while not worth.asking():
            skipped += 1
        assert skipped <= MOST_SKIPPED
        worth.observe(gained, spent, step)


def drive(
    controller: DraftLengthController, steps: int, *, accepted: bool, drafting: float, fixed: bool = False
) -> int:
    """Steps of one sequence with one draft token that comes true or not; how many asked for drafts."""
    asking = 0
    for _ in range(steps):
        rows = 1
        asks = []
        if controller.asking():
            asking += 1
            asks = [Ask(7, 1, (Draft("ngram", (5,)),), fixed=fixed)] if controller.due(7) or fixed else []
        picks = controller.plan(asks, rows=1, tokens=1)
        made = [None if pick.index is None else ask.drafts[pick.index] for ask, pick in zip(asks, picks, strict=True)]
        choice = controller.settle(made, rows=1, tokens=1)
        rows += sum(choice.lengths)
        emitted = [(5, 6) if accepted else (6,) for _ in asks]
        controller.observe(emitted, rows=rows, seconds=controller.cost.seconds(rows), drafting=drafting)
    return asking


def test_drafts_that_never_come_true_are_seldom_asked_for_once_the_host_takes_time_for_them() -> None:
    assert drive(DraftLengthController(FLAT), 400, accepted=False, drafting=0.001) < 120
    assert drive(DraftLengthController(FLAT), 400, accepted=False, drafting=0.0) == 400


def test_drafts_that_come_true_are_asked_for_in_every_step() -> None:
    assert drive(DraftLengthController(FLAT), 400, accepted=True, drafting=0.001) == 400


def test_a_controller_that_chooses_no_lengths_asks_always() -> None:
    assert drive(DraftLengthController(LINEAR, adaptive=False), 100, accepted=False, drafting=0.1) == 100


def test_requests_that_named_a_number_are_on_no_account() -> None:
    assert drive(DraftLengthController(LINEAR), 100, accepted=False, drafting=0.0, fixed=True) == 100
