"""The statistics are right, false alarms are as rare as promised, and the sample sizes see an error of 0.02."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.specdec.gtest import (
    ALPHA,
    DETECTED_TV,
    FAMILY_ALPHA,
    MAX_TESTS,
    POWER,
    Family,
    critical_value,
    make_cells,
    normal_p_value,
    p_value,
    power,
    power_against,
    tail,
    worst_power,
)
from tests.specdec.keyed import Floats, path_law
from tests.specdec.law_cases import CASES, DEPTH, PROMPT, TARGET
from tests.specdec.test_law import NUMBER

LAW = np.array(list(path_law(TARGET.logits_of, CASES["temperature 1"], PROMPT, DEPTH).values()))


@pytest.mark.parametrize(
    ("degrees", "level", "quantile"),  # printed tables
    [(1, 0.05, 3.841), (2, 0.01, 9.210), (10, 0.001, 29.588), (60, 0.05, 79.082), (100, 0.001, 149.449)],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, level: float, quantile: float) -> None:
    assert critical_value(degrees, level) == pytest.approx(quantile, abs=6e-4)
    assert tail(quantile, degrees) == pytest.approx(level, rel=1e-3)


def test_two_degrees_have_an_exponential_tail_far_out() -> None:
    for statistic in (1.0, 30.0, 60.0):
        assert tail(statistic, 2) == pytest.approx(np.exp(-statistic / 2.0), rel=1e-10)


def test_normal_tails_are_two_sided() -> None:
    assert normal_p_value(1.959964) == pytest.approx(0.05, rel=1e-5)
    assert normal_p_value(-1.959964) == pytest.approx(0.05, rel=1e-5)


def test_g_of_a_small_table_is_the_one_done_by_hand() -> None:
    # 2 (30 ln(30/25) + 20 ln(20/25)) = 2.0136, and Williams' 1 + (4 - 1) / (6 * 50 * 1) = 1.01.
    assert p_value([30, 20], [0.5, 0.5]) == pytest.approx(tail(2.0136 / 1.01, 1), rel=1e-3)


def test_an_impossible_outcome_is_rejected_outright() -> None:
    assert p_value([100, 100, 1], [0.5, 0.5, 0.0]) == 0.0
    assert p_value([200, 0], [1.0, 0.0]) == 1.0
    assert p_value([199, 1], [1.0, 0.0]) == 0.0


def test_rare_outcomes_share_a_cell() -> None:
    cells = make_cells([0.5, 0.001, 0.0, 0.46, 0.004, 0.035], 1000)
    assert cells.cell_of[2] == -1
    assert cells.cell_of[1] == cells.cell_of[4] == 0
    assert len(set(cells.cell_of.tolist())) == 5
    assert (cells.law * 1000).min() >= 5.0 - 1e-9
    assert cells.pooled_mass == pytest.approx(0.005)


def test_false_alarms_are_as_frequent_as_the_level_says() -> None:
    rng = np.random.default_rng(1)
    found = np.array([p_value(rng.multinomial(NUMBER, LAW), LAW) for _ in range(4000)])
    for level in (0.5, 0.1, 0.01):
        spread = (level * (1 - level) / len(found)) ** 0.5
        assert abs((found < level).mean() - level) < 4 * spread
    assert found.min() > ALPHA


def half_up_half_down(law: Floats, tv: float) -> Floats:
    """Every probability times 1 +- 2 tv, so that the statistic grows least: Cauchy and Schwarz with equality."""
    up = np.zeros(len(law), dtype=bool)
    mass = {True: 0.0, False: 0.0}
    for outcome in np.argsort(-law):
        up[outcome] = lighter = mass[True] <= mass[False]
        mass[lighter] += law[outcome]
    return np.where(up, law * (1.0 + tv / mass[True]), law * (1.0 - tv / mass[False]))


def best_to_second(law: Floats, tv: float) -> Floats:
    first, second = np.argsort(-law)[:2]
    return law + tv * (np.eye(len(law))[second] - np.eye(len(law))[first])


def worst_to_best(law: Floats, tv: float) -> Floats:
    """The unlikely half, as far as it reaches, goes to the best."""
    order = np.argsort(law)
    mass = np.cumsum(law[order])
    taken = np.where(mass <= tv, law[order], np.maximum(0.0, tv - (mass - law[order])))
    found = law.copy()
    found[order] -= taken
    found[order[-1]] += taken.sum()
    return found


def hotter(law: Floats, tv: float) -> Floats:
    return _at_distance(law, tv, lambda x: law ** (1.0 / (1.0 + x)))


def colder(law: Floats, tv: float) -> Floats:
    return _at_distance(law, tv, lambda x: law ** (1.0 + x))


def towards_uniform(law: Floats, tv: float) -> Floats:
    return _at_distance(law, tv, lambda x: law + x / len(law))


def _at_distance(law: Floats, tv: float, weights_at: Callable[[float], Floats]) -> Floats:
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2.0
        weights = weights_at(middle)
        found = weights / weights.sum()
        low, high = (middle, high) if np.abs(found - law).sum() / 2.0 < tv else (low, middle)
    return found


PERTURBATIONS = [half_up_half_down, best_to_second, worst_to_best, hotter, colder, towards_uniform]


@pytest.mark.parametrize("perturb", PERTURBATIONS)
def test_an_error_of_two_percent_is_seen(perturb: Callable[[Floats, float], Floats]) -> None:
    other = perturb(LAW, DETECTED_TV)
    assert other.min() >= 0.0
    assert np.abs(other - LAW).sum() / 2.0 == pytest.approx(DETECTED_TV, rel=1e-3)
    assert power_against(other, LAW, NUMBER) >= worst_power(LAW, NUMBER) - 1e-9 >= POWER - 1e-9
    rng = np.random.default_rng(2)
    assert np.mean([p_value(rng.multinomial(NUMBER, other), LAW) < ALPHA for _ in range(400)]) >= POWER


def test_the_computed_power_is_the_simulated_one_where_it_is_neither_0_nor_1() -> None:
    other = half_up_half_down(LAW, 0.017)
    rng = np.random.default_rng(3)
    simulated = np.mean([p_value(rng.multinomial(NUMBER, other), LAW) < ALPHA for _ in range(1000)])
    assert 0.3 < simulated < 0.97
    assert simulated == pytest.approx(power_against(other, LAW, NUMBER), abs=0.07)


def test_half_the_samples_would_be_too_few() -> None:
    assert worst_power(LAW, NUMBER // 2) < 0.9


def test_power_at_no_error_is_the_level() -> None:
    for degrees in (1, 30, 124):
        assert power(1e-9, degrees, 0.01) == pytest.approx(0.01, rel=1e-6)


def test_the_family_keeps_its_error_rate() -> None:
    assert ALPHA * MAX_TESTS <= FAMILY_ALPHA
    small = Family()
    for i in range(MAX_TESTS):
        small.accept(f"test {i}", 0.5)
    with pytest.raises(AssertionError, match="more than 256 tests"):
        small.accept("one more", 0.5)
    with pytest.raises(AssertionError, match="already"):
        Family({"twice": 0.1}).accept("twice", 0.2)
    with pytest.raises(AssertionError, match="below"):
        Family().accept("wrong", ALPHA / 2)
