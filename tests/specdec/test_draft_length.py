"""Draft lengths: the best prefix of all drafts by expected tokens a second, and estimates that follow the truth."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.draft_length.acceptance import Acceptance
from specdec.draft_length.controller import PROBE_SHARE, Ask, DraftLengthController, Pick
from specdec.draft_length.cost import StepCost
from specdec.draft_length.lengths import Choice, DraftRounds, choose_lengths
from specdec.draft_length.pace import MOST_SKIPPED, Pace
from specdec.drafters.draft import Draft

FLAT = StepCost([(1, 0.010), (128, 0.0101)])  # memory-bound: rows are free
STEEP = StepCost([(1, 0.010), (2, 0.020), (128, 1.280)])  # compute-bound: every row costs a step

chances = st.lists(st.floats(0.0, 1.0), max_size=3).map(lambda values: sorted(values, reverse=True))
curves = st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6).map(
    lambda values: StepCost([(2**i, seconds) for i, seconds in enumerate(sorted(values))])
)


@given(st.lists(chances, max_size=3), st.integers(1, 20), st.integers(1, 6), curves)
def test_no_combination_of_lengths_is_expected_to_emit_more_a_second(
    survivals: list[list[float]], rows: int, tokens: int, cost: StepCost
) -> None:
    choice = choose_lengths(survivals, rows=rows, tokens=tokens, cost=cost, least_gain=1.0)
    best = max(
        (tokens + sum(sum(c[:n]) for c, n in zip(survivals, lengths, strict=True))) / cost.seconds(rows + sum(lengths))
        for lengths in itertools.product(*(range(len(c) + 1) for c in survivals))
    )
    assert choice.tokens / choice.seconds == pytest.approx(best)
    assert all(0 <= n <= len(c) for n, c in zip(choice.lengths, survivals, strict=True))


def test_rows_that_cost_nothing_are_all_taken_and_rows_that_cost_a_step_each_are_not() -> None:
    survivals = [[0.6, 0.3], [0.5]]
    arguments = {"rows": 2, "tokens": 2, "least_gain": 1.02}
    assert choose_lengths(survivals, cost=FLAT, **arguments).lengths == (2, 1)
    assert choose_lengths(survivals, cost=STEEP, **arguments).lengths == (0, 0)


def test_a_curve_is_read_linearly_between_its_points_and_never_falls() -> None:
    cost = StepCost([(1, 1.0), (3, 3.0), (5, 2.5), (7, 4.0)])
    expected = [1.0, 2.0, 3.0, 3.0, 3.0, 3.5, 4.0, 4.5, 5.0]
    assert [cost.seconds(rows) for rows in range(1, 10)] == expected
    assert cost.seconds_each(1, 9).tolist() == expected
    assert cost.seconds(0) == cost.seconds_each(0, 1)[0] == 1.0


@pytest.mark.parametrize("points", [[], [(1, 0.1)], [(0, 0.1), (1, 0.2)], [(1, 0.1), (1, 0.2)], [(1, 0.0), (2, 1.0)]])
def test_what_is_no_curve_is_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match=r"cost curve|takes some time"):
        StepCost(points)


def test_the_curve_follows_the_steps() -> None:
    cost = StepCost([(1, 0.01), (16, 0.02), (64, 0.06)])
    truth = {1: 0.02, 16: 0.03, 64: 0.20}
    rng = random.Random(0)
    for _ in range(3000):
        rows = rng.choice(list(truth))
        cost.observe(rows, truth[rows] * rng.lognormvariate(0.0, 0.2))
    for rows, seconds in truth.items():
        assert cost.seconds(rows) == pytest.approx(seconds, rel=0.1)


def test_one_odd_step_changes_little() -> None:
    cost = StepCost([(1, 0.01), (16, 0.02)])
    for _ in range(100):
        cost.observe(1, 0.01)
        cost.observe(16, 0.02)
    cost.observe(1, 100.0)
    cost.observe(16, float("nan"))
    assert cost.seconds(1) < 0.011
    assert cost.seconds(16) < 0.022


@pytest.mark.parametrize("scored", [True, False])
def test_estimates_come_to_the_truth_whatever_the_drafter_says(scored: bool) -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    for seq_id in range(400):
        said = (0.9, 0.81) if scored else None
        emitted = [7 if rng.random() < 0.4 else 0, 7]
        acceptance.record(seq_id, "d", (7, 7), said, emitted)
    first, both = acceptance.survivals(1000, "d", 2, (0.9, 0.81) if scored else None)
    # By position the first is right in 0.4 of all; with estimates, both positions are of one kind, right in 4 of 7.
    assert first == pytest.approx(4 / 7 if scored else 0.4, abs=0.08)
    assert both == pytest.approx((4 / 7) ** 2 if scored else 0.4, abs=0.1)


def test_a_sequence_whose_drafts_fail_is_expected_to_fail_and_recovers() -> None:
    acceptance = Acceptance()
    before = acceptance.survivals(1, "d", 1, (0.8,))[0]
    for _ in range(30):
        acceptance.record(1, "d", (7,), (0.8,), (0,))
    low = acceptance.survivals(1, "d", 1, (0.8,))[0]
    for _ in range(60):
        acceptance.record(1, "d", (7,), (0.8,), (7,))
    assert low < 0.3 * before
    recovered = acceptance.survivals(1, "d", 1, (0.8,))
    assert recovered[0] > 0.6
    assert recovered == acceptance.survivals(2, "d", 1, (0.8,))  # as any other
    for _ in range(30):
        acceptance.record(1, "d", (7,), (0.8,), (0,))
    assert acceptance.survivals(1, "d", 1, (0.8,)) < acceptance.survivals(2, "d", 1, (0.8,))
    acceptance.release(1)
    assert acceptance.survivals(1, "d", 1, (0.8,)) == acceptance.survivals(2, "d", 1, (0.8,))


def asks(batch: int, **changes: Any) -> list[Ask]:
    return [Ask(i, 4, (Draft("d", (7, 7, 7, 7)),), **changes) for i in range(batch)]


def step(controller: DraftLengthController, wanted: list[Ask], rows: int | None = None) -> tuple[list[Pick], Choice]:
    rows = len(wanted) if rows is None else rows
    picks = controller.plan(wanted, rows=rows, tokens=len(wanted))
    drafts = [
        Draft(pick.costly, (9,) * pick.length)
        if pick.costly
        else None
        if pick.index is None
        else ask.drafts[pick.index]
        for pick, ask in zip(picks, wanted, strict=True)
    ]
    return picks, controller.settle(drafts, rows=rows, tokens=len(wanted))


def emit(length: int, chance: float, rng: random.Random) -> list[int]:
    """What a target emits that agrees with each draft token with ``chance``."""
    right = next((i for i in range(length) if rng.random() > chance), length)
    return [7] * right + [7 if right == length and rng.random() < chance else 0]


def run(controller: DraftLengthController, batch: int, steps: int, rng: random.Random, chance: float) -> list[float]:
    """Mean draft length of each step."""
    means = []
    for _ in range(steps):
        wanted = [ask for ask in asks(batch) if controller.due(ask.seq_id)]
        _, choice = step(controller, wanted, batch)
        means.append(sum(choice.lengths) / batch)
        rows = batch + sum(choice.lengths)
        controller.observe([emit(length, chance, rng) for length in choice.lengths], rows=rows, seconds=crowded(rows))
    return means


def crowded(rows: int) -> float:
    """Rows are nearly free up to 32, and dear behind."""
    return 0.010 + 0.0002 * rows + 0.002 * max(0, rows - 32)


def curve() -> StepCost:
    return StepCost([(rows, crowded(rows)) for rows in (1, 8, 16, 32, 64, 128)])


@pytest.mark.case("V 50851")
def test_drafts_get_short_under_load_and_long_again_within_a_few_steps() -> None:
    controller, rng = DraftLengthController(curve()), random.Random(2)
    alone = run(controller, 1, 60, rng, 0.8)
    loaded = run(controller, 32, 60, rng, 0.8)
    again = run(controller, 1, 60, rng, 0.8)
    assert sum(alone[-20:]) / 20 > 3
    assert max(loaded[5:]) < 1
    assert sum(again[MOST_SKIPPED : MOST_SKIPPED + 10]) / 10 > 3


@pytest.mark.case("V 50851")
def test_drafts_that_are_never_right_are_given_up_and_come_back_when_they_are() -> None:
    controller, rng = DraftLengthController(StepCost([(1, 0.010), (2, 0.012), (128, 0.2)])), random.Random(3)
    assert sum(run(controller, 4, 80, rng, 0.0)[40:]) == 0
    assert statistics.mean(run(controller, 4, 120, rng, 1.0)[-20:]) > 2  # watched without costing a row


def test_the_same_calls_give_the_same_lengths() -> None:
    def record() -> list[float]:
        return run(DraftLengthController(curve()), 8, 100, random.Random(4), 0.6)

    assert record() == record()


def test_a_request_that_asks_for_a_number_of_drafts_gets_it_whatever_it_costs() -> None:
    controller = DraftLengthController(STEEP)
    wanted = [asks(1, fixed=True)[0], asks(2)[1]]
    assert step(controller, wanted)[1].lengths == (4, 0)


def test_without_adapting_all_that_was_proposed_is_verified() -> None:
    controller = DraftLengthController(STEEP, adaptive=False)
    assert [controller.due(0) for _ in range(20)] == [True] * 20
    assert step(controller, asks(3))[1].lengths == (4, 4, 4)


def test_of_two_drafters_the_one_is_taken_that_comes_true_in_each_sequence() -> None:
    controller = DraftLengthController(FLAT)
    wanted = [Ask(i, 2, (Draft("a", (7, 7)), Draft("b", (8, 8)))) for i in range(2)]
    for _ in range(40):
        step(controller, wanted)
        controller.observe([[7, 7, 7], [8, 8, 8]], rows=6, seconds=0.01)
    assert [pick.index for pick in step(controller, wanted)[0]] == [0, 1]


class Costly:
    """One costly drafter, which says 9, beside a cheap one, which says 7; the target says each with a chance."""

    def __init__(self, round_seconds: Callable[[int], float], cost: StepCost = FLAT) -> None:
        self.controller = DraftLengthController(cost, rounds={"model": round_seconds})
        self.rng = random.Random(5)

    def run(
        self, steps: int, *, cheap: float, costly: float, batch: int = 1, missing: int = 0, **of_asks: int
    ) -> list[list[Pick]]:
        found = []
        for _ in range(steps):
            wanted = asks(batch, missing={"model": missing}, **of_asks)
            picks, choice = step(self.controller, wanted)
            emitted = [
                self.emit(9 if pick.costly else 7, length, cheap, costly)
                for pick, length in zip(picks, choice.lengths, strict=True)
            ]
            self.controller.observe(emitted, rows=batch + sum(choice.lengths), seconds=choice.seconds)
            found.append(picks)
        return found

    def emit(self, drafted: int, length: int, cheap: float, costly: float) -> list[int]:
        emitted: list[int] = []
        while len(emitted) <= length and emitted[-1:] in ([], [drafted]):
            emitted += self.rng.choices([7, 9, 0], [cheap, costly, 1.0 - cheap - costly])
        return emitted


def used(found: list[list[Pick]]) -> float:
    """Share of sequence steps in which the costly drafter drafted."""
    return statistics.mean(bool(pick.costly) for picks in found for pick in picks)


def test_a_costly_drafter_is_used_where_it_pays_after_its_price() -> None:
    assert used(Costly(lambda rows: 0.0005).run(600, cheap=0.1, costly=0.9)[300:]) > 0.9
    assert used(Costly(lambda rows: 0.02).run(600, cheap=0.1, costly=0.9)[300:]) < 0.05
    assert used(Costly(lambda rows: 0.0005).run(600, cheap=0.9, costly=0.1)[300:]) < 0.05


def test_a_costly_drafter_that_does_not_pay_is_tried_again_within_its_share_of_the_time() -> None:
    costly = Costly(lambda rows: 0.004)
    found = costly.run(4000, cheap=0.3, costly=0.0)[500:]
    spent = sum(0.004 * pick.length for picks in found for pick in picks if pick.costly)
    assert 0 < spent < 2 * PROBE_SHARE * 0.0101 * len(found)
    assert used(costly.run(4000, cheap=0.0, costly=1.0)[3000:]) > 0.9  # and found when it pays at last


def test_steps_in_which_a_costly_drafter_still_catches_up_are_no_evidence_against_it() -> None:
    controller = DraftLengthController(FLAT, rounds={"model": lambda rows: 0.0001})
    before = controller.acceptance.survivals(0, "model", 4, None)
    for left in range(5):
        wanted = [Ask(0, 4, missing={"model": 1000 - 200 * left})]
        picks = controller.plan(wanted, rows=1, tokens=1)
        assert picks[0].costly == "model"
        controller.settle([Draft("model")], rows=1, tokens=1)
        controller.observe([[5]], rows=1, seconds=0.01)
    assert controller.acceptance.survivals(0, "model", 4, None) == before


def test_rows_that_a_costly_drafter_lacks_are_part_of_its_price() -> None:
    def price(rows: int) -> float:
        return 0.0002 * rows

    assert used(Costly(price).run(400, cheap=0.1, costly=0.9)[200:]) > 0.9
    assert used(Costly(price).run(400, cheap=0.1, costly=0.9, missing=20_000)[200:]) < 0.05


def test_what_a_costly_drafter_lacks_is_written_off_over_the_output_to_come() -> None:
    def share(tokens_left: int) -> float:
        run = Costly(lambda rows: 0.0002 * rows).run(400, cheap=0.1, costly=0.9, missing=1500, tokens_left=tokens_left)
        return used(run[200:])

    assert share(0) == share(50) < 0.05
    assert share(2000) > 0.9


@given(
    st.lists(chances, min_size=1, max_size=3),
    st.integers(1, 6),
    curves,
    st.lists(st.integers(0, 5), min_size=3, max_size=3),
)
def test_the_time_of_rounds_is_that_of_the_rows_in_each(
    survivals: list[list[float]], rows: int, cost: StepCost, lacks: list[int]
) -> None:
    missing = {s: lacks[s] for s in range(0, len(survivals), 2)}
    rounds = DraftRounds(lambda n: 0.001 + 0.0001 * n, missing)
    choice = choose_lengths(survivals, rows=rows, tokens=2, cost=cost, least_gain=1.0, rounds=rounds)
    again = 0.0
    for r in range(max((choice.lengths[s] for s in missing), default=0)):
        drafting = [s for s in missing if choice.lengths[s] > r]
        again += 0.001 + 0.0001 * (len(drafting) + (sum(missing[s] for s in drafting) if r == 0 else 0))
    assert choice.seconds == pytest.approx(cost.seconds(rows + sum(choice.lengths)) + again)


def test_nobody_is_asked_for_drafts_more_than_some_steps_apart_and_small_batches_always_are() -> None:
    pace = Pace()
    asked = 0
    for _ in range(80):
        if pace.due(1):
            asked += 1
            pace.decided(1, worth=False)
    assert asked == 80 // (MOST_SKIPPED + 1) + 2
    while not pace.due(1):
        pass
    pace.decided(1, worth=True)
    assert pace.due(1)
    for _ in range(10):
        assert pace.due(2)
        pace.decided(2, worth=False, most=0)


def test_drafts_that_disappoint_whenever_they_look_good_are_done_without_and_tried_again_later() -> None:
    """Estimates are right in the mean of all drafts, and far too high for those that are verified."""
    controller = DraftLengthController(StepCost([(1, 0.010), (2, 0.0135), (128, 1.0)]))
    lengths = []
    for _ in range(400):
        wanted = [Ask(0, 1, (Draft("d", (7,), (0.5,)),))]
        _, choice = step(controller, wanted)
        lengths.append(choice.lengths[0])
        controller.observe([[0] if choice.lengths[0] else [7]], rows=1 + choice.lengths[0], seconds=choice.seconds)
    assert lengths[0] == 1
    assert sum(lengths[100:]) < 0.35 * len(lengths[100:])
    assert sum(lengths[200:]) > 0


@pytest.mark.parametrize("missing", [0, 500])
def test_a_costly_drafter_that_gives_no_draft_is_asked_ever_less(missing: int) -> None:
    """Because it cannot, or because it fails whenever it takes in what it lacks."""
    controller = DraftLengthController(FLAT, rounds={"model": lambda rows: 0.0001})
    asked = 0
    for _ in range(1000):
        (pick,) = controller.plan([Ask(0, 4, missing={"model": missing})], rows=1, tokens=1)
        asked += pick.costly == "model"
        controller.settle([Draft("model") if pick.costly else None], rows=1, tokens=1)
        controller.observe([[5]], rows=1, seconds=0.01)
    assert 0 < asked < 30
    controller.release(0)
    (pick,) = controller.plan([Ask(0, 4, missing={"model": 0})], rows=1, tokens=1)
    assert pick.costly == "model"


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_number_that_a_request_names_is_drafted_however_unlikely_and_dear(adaptive: bool) -> None:
    controller = DraftLengthController(STEEP, rounds={"model": lambda rows: 9.0}, adaptive=adaptive)
    text, costly = Ask(0, 12, (Draft("d", (7,) * 12),), fixed=True), Ask(1, 12, missing={"model": 0}, fixed=True)
    for _ in range(50):  # in which nothing comes true
        picks = controller.plan([text, costly], rows=2, tokens=2)
        assert picks[1] == Pick(costly="model", length=12)
        choice = controller.settle([text.drafts[0], Draft("model", (9,) * 12)], rows=2, tokens=2)
        assert choice.lengths == (12, 12)
        controller.observe([[0], [0]], rows=26, seconds=0.3)


def test_rows_that_were_measured_too_dear_are_found_to_be_cheap() -> None:
    """With a curve from a busy machine no draft seems to pay, so no step would ever have those rows."""
    cost = StepCost([(1, 0.010), (2, 0.030), (4, 0.060), (64, 1.0)])
    controller, rng = DraftLengthController(cost), random.Random(6)
    lengths = []
    for _ in range(25000):
        wanted = asks(1) if controller.due(0) else []
        _, choice = step(controller, wanted, 1)
        length = sum(choice.lengths)
        lengths.append(length)
        controller.observe(
            [emit(n, 0.8, rng) for n in choice.lengths], rows=1 + length, seconds=0.010 + 0.0002 * length
        )
    assert sum(lengths[:20]) < 10
    assert statistics.mean(lengths[-500:]) > 2.5
