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


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_the_time_that_a_named_number_takes_is_not_charged_to_the_others(drafter: str) -> None:
    """One client must not be able to take everybody's drafts by asking for a dear drafter."""
    costly = drafter == "model"
    controller = DraftLengthController(FLAT, rounds={"model": lambda rows: 0.05} if costly else None)
    named = Ask(1, 4, () if costly else (Draft("ngram", (5,) * 4),), {"model": 0} if costly else None, fixed=True)
    drafted = 0
    for _ in range(100):
        asks = [named]
        if controller.asking() and controller.due(0):
            asks.append(Ask(0, 1, (Draft("suffix", (5,)),)))
        picks = controller.plan(asks, rows=2, tokens=2)
        made = [
            Draft("model", (9,) * pick.length)
            if pick.costly
            else None
            if pick.index is None
            else ask.drafts[pick.index]
            for pick, ask in zip(picks, asks, strict=True)
        ]
        choice = controller.settle(made, rows=2, tokens=2)
        drafted += sum(choice.lengths[1:])
        emitted = [(6,), (5, 6)][: len(asks)]
        controller.observe(emitted, rows=2 + sum(choice.lengths), seconds=0.01, drafting=0.05 if costly else 0.008)
    assert drafted > 90


def test_a_costly_drafter_takes_in_a_long_prompt_without_a_pause() -> None:
    """It is written off over many steps, so that it looks like a loss in each in which it is done."""
    controller = DraftLengthController(FLAT, rounds={"model": lambda rows: 0.001 + 0.00005 * rows})
    for missing in range(8000, 0, -250):
        assert controller.asking()
        (pick,) = controller.plan([Ask(0, 4, missing={"model": missing}, tokens_left=1000)], rows=1, tokens=1)
        assert pick.costly == "model"
        controller.settle([Draft("model")], rows=1, tokens=1)
        controller.observe([(5,)], rows=1, seconds=0.01, drafting=0.0135)
    assert controller.asking()


def test_trying_a_costly_drafter_in_vain_takes_no_drafts_from_the_cheap_ones() -> None:
    """It has a share of the time of its own."""
    controller = DraftLengthController(FLAT, rounds={"model": lambda rows: 0.004})
    probes = 0
    for step in range(600):
        assert controller.asking()
        ask = Ask(0, 1, (Draft("suffix", (5,)),), missing={"model": 0})
        (pick,) = controller.plan([ask], rows=1, tokens=1)
        costly = bool(pick.costly)
        made = Draft("model", (9,)) if costly else None if pick.index is None else ask.drafts[pick.index]
        (length,) = controller.settle([made], rows=1, tokens=1).lengths
        emitted = (5, 6)[: length + 1] if step % 4 == 0 and not costly else (6,)
        probes += costly and step > 20
        controller.observe([emitted], rows=1 + length, seconds=0.01, drafting=0.008 if costly else 0.0001)
    assert probes > 3


def test_one_that_is_left_of_a_crowd_drafts_again_within_eight_steps() -> None:
    """Whatever was skipped of it in the crowd, where drafts come true and yet no row is worth its time."""

    def step(controller: DraftLengthController, batch: int) -> int:
        due = [i for i in range(batch) if controller.due(i)] if controller.asking() else []
        asks = [Ask(i, 1, (Draft("suffix", (5,), (0.9,)),)) for i in due]
        picks = controller.plan(asks, rows=batch, tokens=batch)
        made = [None if pick.index is None else ask.drafts[pick.index] for pick, ask in zip(picks, asks, strict=True)]
        choice = controller.settle(made, rows=batch, tokens=batch)
        rows = batch + sum(choice.lengths)
        controller.observe(
            [(5, 6)[: n + 1] for n in choice.lengths],
            rows=rows,
            seconds=controller.cost.seconds(rows),
            drafting=0.001 * len(asks),
        )
        return sum(choice.lengths)

    for crowded in range(100, 230, 9):
        controller = DraftLengthController(StepCost([(1, 0.01), (8, 0.0101), (32, 0.1), (33, 0.11), (128, 1.1)]))
        assert sum(step(controller, 32) for _ in range(crowded)) < crowded
        alone = [step(controller, 1) for _ in range(40)]
        assert alone.index(1) <= MOST_SKIPPED, crowded
