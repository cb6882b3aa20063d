"""Which cases a suite has.

``quick``   every pair of two factors' values in at least one case (``q``), plain decoding to shorter lengths (``p``),
            and more cases of large batches until enough positions are compared (``f``);
``full``    the same, and every combination of three of the dangerous factors (``x``).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from bench.verify.cases import Case, parse_spec
from bench.verify.covering import Design
from bench.verify.factors import DANGEROUS, NO_DRAFTER

SUITES = ("quick", "full")
QUICK_POSITIONS = 40_000
_FILL_BATCHES = ("16", "8", "16")
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

    def fill(self) -> Iterator[Case]:
        """Cases that add positions, without end: large batches, medium length, otherwise random values."""
        number = 0
        while True:
            number += 1
            yield self.fill_case(number)

    def fill_case(self, number: int) -> Case:
        lengths = next(factor.values for factor in self.design.factors if factor.name == "length")
        fixed = {
            "batch": (_FILL_BATCHES[number % len(_FILL_BATCHES)],),
            "length": ("64",) if "64" in lengths else lengths[-1:],
            "condition": ("none", "tight"),
        }
        row = self.design.random_row(random.Random(f"fill/{self.seed}/{number}"), fixed)
        return Case(f"f{number:03d}", row)

    def find(self, name: str) -> Case:
        """The case with this id or this list of values. Raises ValueError, one line."""
        if "=" in name:
            values = parse_spec(name, {factor.name: factor.values for factor in self.design.factors})
            if not self.design.allows(values):
                reasons = [c.reason for c in self.design.constraints if not c.allows(values)]
                raise ValueError(f"a case that is left out: {'; '.join(reasons)}")
            return Case("case", values)
        if name[:1] == "f" and name[1:].isdigit():
            return self.fill_case(int(name[1:]))
        for case in self.cases:
            if case.id == name:
                return case
        raise ValueError(f"case {name!r}: the suite {self.name} has no such case; --list shows them")


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
