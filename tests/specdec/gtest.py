"""G-tests of counts against a law: p-values, critical values, power, and one error rate for the whole family.

With n samples and expected counts E_i = n p_i, ``G = 2 sum O_i log(O_i / E_i)`` is chi-squared with (cells - 1) degrees
of freedom if the law is right, and noncentral chi-squared with noncentrality ``n sum (p'_i - p_i)^2 / p_i`` if it is p'
(Cressie and Read, 1984). Whatever the perturbation, Cauchy and Schwarz give ``sum (p'_i - p_i)^2 / p_i >= 4 TV^2``,
so the power at ``4 n TV^2`` is the power in the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

FAMILY_ALPHA = 1e-6  # chance that any test of the family fails although every law is right
MAX_TESTS = 256  # members of the family; FAMILY_ALPHA is divided among them (Bonferroni)
ALPHA = FAMILY_ALPHA / MAX_TESTS
DETECTED_TV = 0.02  # the total-variation error that has to be seen ..
POWER = 0.99  # .. with this probability
LEAST_EXPECTED = 5.0  # outcomes expected less often share one cell

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cells:
    """Outcomes grouped so that every cell is expected at least ``LEAST_EXPECTED`` times."""

    law: Floats  # [cells], above 0
    cell_of: NDArray[np.int64]  # [outcomes]; -1 for an impossible one
    pooled_mass: float  # what the shared cell holds: an error within it cannot be seen

    @property
    def degrees(self) -> int:
        return len(self.law) - 1


def make_cells(law: ArrayLike, number: int) -> Cells:
    """Cells for ``number`` samples of ``law`` [outcomes], which sums to 1."""
    probabilities = np.asarray(law, dtype=np.float64)
    assert abs(probabilities.sum() - 1.0) < 1e-9, probabilities.sum()
    order = np.argsort(probabilities, kind="stable")
    order = order[probabilities[order] > 0.0]
    expected = number * probabilities[order]
    pooled = int(np.searchsorted(expected, LEAST_EXPECTED))
    while 0 < pooled < len(order) and expected[:pooled].sum() < LEAST_EXPECTED:
        pooled += 1
    cell_of = np.full(len(probabilities), -1, dtype=np.int64)
    first = 1 if pooled else 0
    cell_of[order[:pooled]] = 0
    cell_of[order[pooled:]] = np.arange(first, first + len(order) - pooled)
    mass = np.bincount(cell_of[order], weights=probabilities[order])
    return Cells(mass, cell_of, float(probabilities[order[:pooled]].sum()) if pooled > 1 else 0.0)


def p_value(counts: ArrayLike, law: ArrayLike, *, fitted: int = 0) -> float:
    """Chance of counts [outcomes] at least as far from ``law`` [outcomes]; 0 if an impossible outcome was seen.

    ``fitted``: how many numbers in ``law`` were taken from the counts themselves; each costs a degree of freedom.
    """
    seen = np.asarray(counts, dtype=np.int64)
    number = int(seen.sum())
    cells = make_cells(law, number)
    possible = cells.cell_of >= 0
    if seen[~possible].any():
        return 0.0
    degrees = cells.degrees - fitted
    if degrees <= 0:
        return 1.0
    observed = np.bincount(cells.cell_of[possible], weights=seen[possible], minlength=len(cells.law))
    some = observed > 0
    statistic = 2.0 * float((observed[some] * np.log(observed[some] / (number * cells.law[some]))).sum())
    # Williams' correction: G is a little too large where few are expected.
    statistic /= 1.0 + (float((1.0 / cells.law).sum()) - 1.0) / (6.0 * number * degrees)
    return tail(statistic, degrees)


def tail(statistic: float, degrees: int) -> float:
    """Pr[chi-squared >= statistic]."""
    return float(_upper_gamma(np.array([degrees / 2.0]), statistic / 2.0)[0])


def critical_value(degrees: int, alpha: float) -> float:
    """The statistic whose :func:`tail` is ``alpha``."""
    low, high = 0.0, degrees + 1000.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if tail(middle, degrees) > alpha else (low, middle)
    return high


def power(noncentrality: float, degrees: int, alpha: float = ALPHA) -> float:
    """Pr[noncentral chi-squared >= the critical value]: a Poisson mixture of chi-squared tails."""
    middle = noncentrality / 2.0
    terms = np.arange(math.ceil(middle + 12.0 * math.sqrt(middle) + 50.0), dtype=np.float64)
    log_weights = terms * math.log(middle) - middle - np.array([math.lgamma(j + 1.0) for j in terms])
    tails = _upper_gamma(degrees / 2.0 + terms, critical_value(degrees, alpha) / 2.0)
    return float((np.exp(log_weights) * tails).sum())


def worst_power(law: ArrayLike, number: int, tv: float = DETECTED_TV) -> float:
    """The least power of :func:`p_value` at level ``ALPHA`` against any law at total variation ``tv`` from ``law``."""
    cells = make_cells(law, number)
    if cells.degrees == 0:
        return 1.0  # one outcome is possible: any other is seen at once
    visible = tv - cells.pooled_mass
    return power(4.0 * number * visible**2, cells.degrees) if visible > 0.0 else 0.0


def power_against(other: ArrayLike, law: ArrayLike, number: int) -> float:
    """Power of :func:`p_value` at level ``ALPHA`` if the samples follow ``other`` [outcomes]."""
    cells = make_cells(law, number)
    possible = cells.cell_of >= 0
    probabilities = np.asarray(other, dtype=np.float64)
    impossible = float(probabilities[~possible].sum())
    found = np.bincount(cells.cell_of[possible], weights=probabilities[possible], minlength=len(cells.law))
    distance = float(((found - cells.law) ** 2 / cells.law).sum())
    seen = power(number * distance, cells.degrees) if cells.degrees and distance else 0.0
    return 1.0 - (1.0 - seen) * (1.0 - impossible) ** number


def normal_p_value(z: float) -> float:
    """Two-sided p-value of a standard normal statistic."""
    return math.erfc(abs(z) / math.sqrt(2.0))


def _upper_gamma(a: Floats, x: float) -> Floats:
    shape = torch.from_numpy(a)
    found: Floats = torch.special.gammaincc(shape, torch.full_like(shape, x)).numpy()
    return found


@dataclass
class Family:
    """The tests of one run. Each may fail by chance with probability ``ALPHA``, all together ``FAMILY_ALPHA``."""

    p_values: dict[str, float] = field(default_factory=dict)

    def follows(self, name: str, counts: ArrayLike, law: ArrayLike, *, fitted: int = 0) -> None:
        """Fail unless ``counts`` [outcomes] may come from ``law`` [outcomes]; see :func:`p_value`."""
        self.accept(name, p_value(counts, law, fitted=fitted))

    def accept(self, name: str, p: float) -> None:
        """Enter a test of the family by its p-value; fail if it rejects."""
        assert name not in self.p_values, f"the family has a test {name!r} already"
        self.p_values[name] = p
        assert len(self.p_values) <= MAX_TESTS, f"more than {MAX_TESTS} tests: ALPHA has to be made smaller"
        assert p >= ALPHA, f"{name}: p = {p:.3g}, below {ALPHA:.3g}"
