"""Covering designs: few rows in which every valid combination of any two (or more) factors' values occurs.

A row gives each factor one value. Rows are built one at a time: start from a combination that no row has yet, give the
other factors, one by one, the value that covers the most new combinations, and keep the best of a few such rows
(the greedy method of AETG: Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE TSE 23(7), 1997). Constraints forbid
combinations; what no allowed row can hold does not count as valid. The same arguments give the same rows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

Row = Mapping[str, str]
Combination = tuple[tuple[str, str], ...]  # ((factor, value), ..), in the order of the factors

_ATTEMPTS = 6  # candidates for each row


@dataclass(frozen=True, slots=True)
class Factor:
    """``usual`` are the values to take, in turn, where any would do."""

    name: str
    values: tuple[str, ...]
    usual: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """Rows for which ``allows`` (asked once all of ``names`` have a value) is false are left out, for ``reason``."""

    reason: str
    names: tuple[str, ...]
    allows: Callable[[Row], bool]


class Design:
    """Factors and constraints, and the rows that cover them."""

    def __init__(self, factors: Sequence[Factor], constraints: Sequence[Constraint]) -> None:
        self.factors = tuple(factors)
        self.constraints = tuple(constraints)
        self._place = {factor.name: i for i, factor in enumerate(self.factors)}
        self._values = {factor.name: factor.values for factor in self.factors}
        for constraint in constraints:
            unknown = set(constraint.names) - set(self._values)
            if unknown:
                raise ValueError(f"constraint {constraint.reason!r} names an unknown factor: {sorted(unknown)}")
        self._constrained = [f.name for f in self.factors if any(f.name in c.names for c in constraints)]
        self._name_sets = [frozenset(c.names) for c in self.constraints]
        self._naming = {name: [i for i, names in enumerate(self._name_sets) if name in names] for name in self._values}
        self._completable: dict[tuple[str | None, ...], bool] = {}
        self._possible: dict[tuple[int | str | None, ...], bool] = {}
        # Allowed rows that were found, of the constrained factors: most partial rows are part of one of them.
        self._rows_with: dict[tuple[str, str], int] = {}  # by (factor, value): bit i is set if the i-th row has it
        self._num_rows = 0

    def allows(self, row: Row) -> bool:
        """No constraint forbids ``row``, which may be partial."""
        return all(c.allows(row) for c in self.constraints if all(name in row for name in c.names))

    def completable(self, row: Row) -> bool:
        """Some allowed complete row holds the partial ``row``."""
        known = {name: row[name] for name in self._constrained if name in row}
        return self._in_a_row(known) or self._known(
            known, lambda: self._possible_to_each(known, range(len(self.constraints))) and self._complete(known)
        )

    def _in_a_row(self, row: Row) -> bool:
        """A complete row that was found before holds ``row``."""
        rows = (1 << self._num_rows) - 1
        for item in row.items():
            rows &= self._rows_with.get(item, 0)
        return rows != 0

    def _known(self, row: dict[str, str], find: Callable[[], bool]) -> bool:
        """What was found for ``row`` before, else what ``find`` says."""
        key = tuple(row.get(name) for name in self._constrained)
        found = self._completable.get(key)
        if found is None:
            found = self._completable[key] = find()
        return found

    def _complete(self, row: dict[str, str]) -> bool:
        """Some allowed complete row holds the allowed ``row``."""
        # What the nearest constraint lacks comes first, so that a dead end shows early.
        open_ = [lacking for names in self._name_sets if (lacking := names - row.keys())]
        if not open_:
            for item in row.items():
                self._rows_with[item] = self._rows_with.get(item, 0) | 1 << self._num_rows
            self._num_rows += 1
            return True
        name = min(sorted(open_, key=len)[0])
        for value in self._values[name]:
            wider = {**row, name: value}
            if self._possible_to_each(wider, self._naming[name]) and (
                self._in_a_row(wider) or self._known(wider, partial(self._complete, wider))
            ):
                return True
        return False

    def _possible_to_each(self, row: Row, numbers: Iterable[int]) -> bool:
        """Each of these constraints, by itself, allows some values of those of its factors that ``row`` lacks."""
        for number in numbers:
            constraint = self.constraints[number]
            key = (number, *map(row.get, constraint.names))
            if key not in self._possible:
                lacking = [name for name in constraint.names if name not in row]
                self._possible[key] = any(
                    constraint.allows({**row, **dict(zip(lacking, values, strict=True))})
                    for values in itertools.product(*(self._values[name] for name in lacking))
                )
            if not self._possible[key]:
                return False
        return True

    def combinations(self, strength: int, names: Sequence[str] | None = None) -> Iterator[Combination]:
        """All valid combinations of ``strength`` factors (of ``names``, if given)."""
        chosen = [factor for factor in self.factors if names is None or factor.name in names]
        for group in itertools.combinations(chosen, strength):
            for values in itertools.product(*(factor.values for factor in group)):
                combination = tuple(zip((factor.name for factor in group), values, strict=True))
                if self.completable(dict(combination)):
                    yield combination

    def covered(self, rows: Iterable[Row], strength: int, names: Sequence[str] | None = None) -> set[Combination]:
        """The combinations of ``strength`` factors that occur in ``rows``."""
        chosen = [factor.name for factor in self.factors if names is None or factor.name in names]
        return {
            tuple((name, row[name]) for name in group)
            for row in rows
            for group in itertools.combinations(chosen, strength)
        }

    def cover(
        self, strength: int = 2, *, names: Sequence[str] | None = None, rows: Sequence[Row] = (), seed: int = 0
    ) -> list[dict[str, str]]:
        """Rows that, together with ``rows``, hold every valid combination."""
        rng = random.Random(f"cover/{seed}")
        missing = dict.fromkeys(self.combinations(strength, names))  # an ordered set
        for combination in self.covered(rows, strength, names):
            missing.pop(combination, None)
        chosen = self._place if names is None else {name: self._place[name] for name in names}
        made: list[dict[str, str]] = []
        while missing:
            start = next(iter(missing))
            best, gained = None, -1
            for _ in range(_ATTEMPTS):
                row = self._candidate(start, missing, strength, chosen, len(made), rng)
                gain = sum(c in missing for c in self.covered([row], strength, names))
                if gain > gained:
                    best, gained = row, gain
            assert best is not None
            made.append(best)
            for combination in self.covered([best], strength, names):
                missing.pop(combination, None)
        return made

    def random_row(self, rng: random.Random, fixed: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """An allowed row; ``fixed`` narrows the values of some factors. Raises ValueError if there is none."""
        row: dict[str, str] = {}
        for name in sorted(self._values, key=lambda name: (name not in fixed, self._place[name])):
            values = list(fixed.get(name, self._values[name]))
            rng.shuffle(values)
            row[name] = self._first_possible(row, name, values)
        return {factor.name: row[factor.name] for factor in self.factors}

    def row_with(self, combination: Combination, preferred: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """An allowed row that holds the valid ``combination``, otherwise the first of ``preferred`` that go with it."""
        row = dict(combination)
        for factor in self.factors:
            if factor.name not in row:
                first = [value for value in preferred.get(factor.name, ()) if value in factor.values]
                row[factor.name] = self._first_possible(row, factor.name, [*first, *factor.values])
        return {factor.name: row[factor.name] for factor in self.factors}

    def _candidate(
        self,
        start: Combination,
        missing: Mapping[Combination, None],
        strength: int,
        chosen: Mapping[str, int],
        turn: int,
        rng: random.Random,
    ) -> dict[str, str]:
        row = dict(start)
        others = [factor for factor in self.factors if factor.name not in row]
        rng.shuffle(others)
        others.sort(key=lambda factor: factor.name not in chosen)
        for factor in others:
            gains = dict.fromkeys(factor.values, 0)
            if factor.name in chosen:
                known = [name for name in row if name in chosen]
                for group in itertools.combinations(known, strength - 1):
                    names = sorted((*group, factor.name), key=self._place.__getitem__)
                    for value in factor.values:
                        row[factor.name] = value
                        gains[value] += tuple((name, row[name]) for name in names) in missing
                row.pop(factor.name, None)
            usual = factor.usual or factor.values
            first = turn % len(usual)
            preferred = [*usual[first:], *usual[:first]]
            place = {value: preferred.index(value) if value in preferred else len(preferred) for value in factor.values}
            values = sorted(factor.values, key=lambda value: (-gains[value], place[value], rng.random()))
            row[factor.name] = self._first_possible(row, factor.name, values)
        return {factor.name: row[factor.name] for factor in self.factors}

    def _first_possible(self, row: Row, name: str, values: Sequence[str]) -> str:
        for value in values:
            if self.completable({**row, name: value}):
                return value
        raise ValueError(f"no value of {name} goes with {dict(row)}")
