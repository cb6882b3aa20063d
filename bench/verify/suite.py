"""Which cases a suite has.

``quick``   every pair of two factors' values in at least one case (``q``), plain decoding to shorter lengths (``p``),
            cases for those pairs that did not come about (``r``), and more large batches until enough positions are
            compared (``f``);
``full``    the same, and every combination of three of the dangerous factors (``x``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, count

from bench.verify.cases import Case, parse_spec
from bench.verify.covering import Combination, Design
from bench.verify.factors import DANGEROUS, NO_DRAFTER, ORACLES

SUITES = ("quick", "full")
QUICK_POSITIONS = 40_000
_FILL_BATCHES = ("16", "8", "16")
_TRIES = 3  # more cases for a pair that did not come about: with others that did not, then by itself
_MOST_TRIES = 40
# Where most things come about: many requests, room for them, something to draft and to reject.
_FERTILE = {
    "batch": ("8", "4", "2"), "sampling": ("greedy",), "prompts": ("repeated", "random"), "length": ("64", "16", "7"),
    "condition": ("none",), "cache": ("off", "cold"), "drafter": ("oracle", "random"), "k": ("2", "1", "4"),
    "block_size": ("4", "1", "16"), "chunk": ("512", "128"), "threads": ("2",),
    "arrival": ("together",), "aborts": ("no",),
}  # fmt: skip
_PLAIN_LENGTHS = ("1", "2", "7", "16")


class Suite:
    """The cases of one name, made from one seed. Raises ValueError for an unknown name."""

    def __init__(self, name: str, design: Design, seed: int = 0) -> None:
        if name not in SUITES:
            raise ValueError(f"suite must be {' or '.join(SUITES)}, got {name!r}")
        self.name = name
        self.design = design
        self.seed = seed

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """In the order in which they run, without the fill."""
        pairs = self.design.cover(2, seed=self.seed)
        cases = [*_plain_cases(self.design), *_numbered("q", pairs)]
        if self.name == "full":
            cases += _numbered("x", self.design.cover(3, names=DANGEROUS, rows=pairs, seed=self.seed))
        return tuple(cases)

    def again(self, missing: Callable[[], set[Combination]]) -> Iterator[Case]:
        """Cases for the pairs that ``missing`` names, asked before each: what did not come about gets other company.

        First a case holds as many of them as go together; a pair that does not come about there is tried by itself.
        """
        tried: dict[Combination, int] = {}
        for number in range(1, _MOST_TRIES + 1):
            left = sorted(pair for pair in missing() if tried.get(pair, 0) < _TRIES)
            if not left:
                return
            pair = min(left, key=lambda pair: tried.get(pair, 0))
            turn = tried.get(pair, 0)
            held = (
                [pair]
                if turn
                else self._together(pair, (other for other in left if other != pair and other not in tried))
            )
            for one in held:
                tried[one] = turn + 1
            skipped = max(0, turn - 1)
            preferred = {name: values[skipped:] for name, values in _FERTILE.items()}
            yield Case(f"r{number:03d}", self.design.row_with(tuple(dict.fromkeys(chain(*held))), preferred))

    def _together(self, first: Combination, others: Iterable[Combination]) -> list[Combination]:
        """``first`` and those of ``others`` that one row can hold beside it, in their order."""
        row, held = dict(first), [first]
        for other in others:
            wider = {**row, **dict(other)}
            if all(row.get(name, value) == value for name, value in other) and self.design.completable(wider):
                row = wider
                held.append(other)
        return held

    def fill(self) -> Iterator[Case]:
        """Cases that add positions, without end: otherwise random values, but large batches, and drafts from the known
        answers, spoiled here and there, so that in each step each sequence accepts another number of them."""
        lengths = self._values("length")
        for number in count(1):
            fixed = {
                "batch": (_FILL_BATCHES[number % len(_FILL_BATCHES)],),
                "length": ("64",) if "64" in lengths else lengths[-1:],
                "condition": ("none",),
                "drafter": tuple(name for name, spoiled in ORACLES.items() if spoiled),
                "chunk": ("128", "512"),
            }
            yield Case(f"f{number:03d}", self.design.random_row(random.Random(f"fill/{self.seed}/{number}"), fixed))

    def spread(self, most: Callable[[Case], int], limit: int) -> list[Case]:
        """Cases with at most ``limit`` positions in all (``most``: those of one), spread over the factors' values.

        The next one is always that with the most values, then pairs, that none before it has.
        """
        left = {case.id: case for case in self.cases}
        sizes = {case.id: most(case) for case in self.cases}
        values_of, pairs_of = (
            {case.id: self.design.covered([case.values], strength) for case in self.cases} for strength in (1, 2)
        )
        values, pairs = set[Combination](), set[Combination]()
        chosen: list[Case] = []
        while True:
            left = {name: case for name, case in left.items() if sizes[name] <= limit}
            if not left:
                return sorted(chosen, key=self.cases.index)
            best = max(
                left.values(),
                key=lambda case: (
                    case.k > 0 or any(other.k > 0 for other in chosen),  # speculation above all
                    len(values_of[case.id] - values),
                    len(pairs_of[case.id] - pairs),
                ),
            )
            chosen.append(best)
            limit -= sizes[best.id]
            del left[best.id]
            values |= values_of[best.id]
            pairs |= pairs_of[best.id]

    def _values(self, name: str) -> tuple[str, ...]:
        return next(factor.values for factor in self.design.factors if factor.name == name)

    def find(self, name: str) -> Case:
        """The case with this id or this list of values. Raises ValueError, one line."""
        if "=" in name:
            values = parse_spec(name, {factor.name: factor.values for factor in self.design.factors})
            if not self.design.allows(values):
                reasons = [c.reason for c in self.design.constraints if not c.allows(values)]
                raise ValueError(f"a case that is left out: {'; '.join(reasons)}")
            return Case("case", values)
        for case in self.cases:
            if case.id == name:
                return case
        raise ValueError(
            f"case {name!r}: the suite {self.name} has no such case; --list shows them, a report has the values of all"
        )


def _numbered(letter: str, rows: Sequence[Mapping[str, str]]) -> list[Case]:
    return [Case(f"{letter}{number:03d}", row) for number, row in enumerate(rows, 1)]


def _plain_cases(design: Design) -> list[Case]:
    """Each sampling set, plainly decoded to one of the shorter lengths: a prefix of what the others are held to."""
    values = {factor.name: factor.values for factor in design.factors}
    lengths = [length for length in _PLAIN_LENGTHS if length in values["length"]]
    plain = {
        "batch": "1",
        "condition": "none",
        "cache": "off",
        "drafter": NO_DRAFTER,
        "k": "0",
        "block_size": "16",
        "chunk": "512",
        "threads": values["threads"][-1],
        "arrival": "together",
        "aborts": "no",
    }
    rows = []
    for i, sampling in enumerate(values["sampling"]):
        chosen = {
            **plain,
            "sampling": sampling,
            "prompts": values["prompts"][i % len(values["prompts"])],
            "length": lengths[i % len(lengths)],
        }
        rows.append({factor.name: chosen[factor.name] for factor in design.factors})
    return _numbered("p", rows)
