"""Covering designs: every valid combination, counted by brute force, and nothing that a constraint forbids."""

from __future__ import annotations

import itertools
import random

import pytest

from bench.verify.covering import Constraint, Design, Factor, Row
from bench.verify.factors import DANGEROUS, DRAFT_LENGTHS, build_design, lengths_for
from bench.verify.suite import Suite

SMALL = (
    Factor("a", ("0", "1", "2")),
    Factor("b", ("x", "y")),
    Factor("c", ("p", "q", "r", "s"), usual=("q",)),
    Factor("d", ("0", "1")),
)
# b = y forces c = p, and c = p forces d = 0: so b = y with d = 1 is impossible although no constraint says it.
CHAINED = (
    Constraint("y takes p", ("b", "c"), lambda row: row["b"] != "y" or row["c"] == "p"),
    Constraint("p takes 0", ("c", "d"), lambda row: row["c"] != "p" or row["d"] == "0"),
)


def real_design() -> Design:
    return build_design(
        sampling=("greedy", "top-p", "everything"),
        prompts=("short", "long", "random"),
        drafters=("ngram", "random", "none", "perfect", "oracle"),
        max_model_len=2048,
        threads=("1", "2"),
    )


def all_rows(design: Design) -> list[Row]:
    names = [factor.name for factor in design.factors]
    rows = [dict(zip(names, v, strict=True)) for v in itertools.product(*(f.values for f in design.factors))]
    return [row for row in rows if all(c.allows(row) for c in design.constraints)]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("constraints", [(), CHAINED], ids=["free", "constrained"])
def test_every_combination_that_an_allowed_row_can_hold_is_covered(
    strength: int, constraints: tuple[Constraint, ...]
) -> None:
    design = Design(SMALL, constraints)
    possible = design.covered(all_rows(design), strength)
    assert set(design.combinations(strength)) == possible
    rows = design.cover(strength)
    assert design.covered(rows, strength) == possible
    assert len(rows) <= len(all_rows(design))


def test_no_row_is_forbidden_and_every_row_is_complete() -> None:
    design = real_design()
    rows = design.cover(2)
    assert all(all(c.allows(row) for c in design.constraints) for row in rows)
    assert all(list(row) == [factor.name for factor in design.factors] for row in rows)


def test_the_real_design_has_all_its_pairs_in_few_rows() -> None:
    design = real_design()
    rows = design.cover(2)
    # Two values are a valid pair if some row, however found, holds them: random search finds no pair that is missing.
    rng = random.Random(1)
    found = design.covered([design.random_row(rng, {}) for _ in range(3000)], 2)
    assert found <= set(design.combinations(2)) <= design.covered(rows, 2)
    assert len(rows) < 100


def test_the_dangerous_factors_are_crossed_three_by_three_in_the_full_suite() -> None:
    design = real_design()
    suite = Suite("full", design)
    rows = [case.values for case in suite.cases]
    assert set(design.combinations(3, DANGEROUS)) <= design.covered(rows, 3, DANGEROUS)
    assert set(design.combinations(2)) <= design.covered(rows, 2)
    assert len({case.id for case in suite.cases}) == len(suite.cases)


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    specs = [[case.spec for case in Suite("quick", real_design(), seed).cases] for seed in (0, 0, 1)]
    assert specs[0] == specs[1] != specs[2]


def test_rows_that_are_there_already_are_not_made_again() -> None:
    design = real_design()
    rows = design.cover(2)
    assert design.cover(2, rows=rows) == []


def test_every_draft_length_meets_every_drafter_and_none_means_no_drafter() -> None:
    pairs = set(real_design().combinations(2))
    for k in DRAFT_LENGTHS[1:]:
        assert (("drafter", "oracle"), ("k", k)) in pairs
    assert (("drafter", "none"), ("k", "0")) in pairs
    assert (("drafter", "ngram"), ("k", "0")) not in pairs


@pytest.mark.parametrize(
    ("context", "longest"), [(1, "1"), (5, "2"), (64, "16"), (130, "64"), (300, "128"), (600, "256"), (8192, "512")]
)
def test_output_lengths_fit_the_models_context(context: int, longest: str) -> None:
    lengths = lengths_for(context)
    assert lengths[-1] == longest
    assert sum(int(length) > 64 for length in lengths) <= 1


def test_every_sampling_set_and_prompt_class_decodes_far_though_few_requests_do() -> None:
    design = real_design()
    values = {factor.name: factor.values for factor in design.factors}
    pairs = set(design.combinations(2))
    for name in ("sampling", "prompts"):
        for value in values[name]:
            assert ((name, value), ("length", "512")) in pairs or (("length", "512"), (name, value)) in pairs
    far = {(row["sampling"], row["prompts"]) for row in design.cover(2) if row["length"] == "512"}
    assert len(far) == max(len(values["sampling"]), len(values["prompts"]))


def test_what_did_not_come_about_is_tried_together_first_and_then_by_itself() -> None:
    suite = Suite("quick", real_design())
    wanted = set(list(suite.design.combinations(2))[::40])
    held = []
    for case in suite.again(lambda: wanted):  # nothing ever comes about
        held.append({pair for pair in wanted if all(case.values[name] == value for name, value in pair)})
    first = next(i for i, pairs in enumerate(held) if wanted <= set().union(*held[: i + 1]))
    assert first + 1 < len(wanted) / 2
    again = held[first + 1 : first + 1 + len(wanted)]
    assert len(again) == min(len(wanted), 40 - first - 1)


def test_no_pair_that_comes_about_is_tried_again() -> None:
    suite = Suite("quick", real_design())
    missing = set(list(suite.design.combinations(2))[::40])
    cases = 0
    for case in suite.again(missing.copy):
        missing.difference_update(suite.design.covered([case.values], 2))
        cases += 1
    assert not missing
    assert cases < 30
