"""What was covered: of every value and every pair of values, what happened in the cases that name it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.verify.cases import Case
from bench.verify.counting import lacking
from bench.verify.covering import Combination, Design
from bench.verify.factors import DANGEROUS
from bench.verify.runner import CaseResult

# Of bench.verify.counting.Counts: summed over cases, they tell what happened.
COUNTED = (
    "drafted", "accepted", "drafted_positions", "steps", "steps_of_2", "steps_of_8", "preemptions", "cached_tokens",
    "aborted",
)  # fmt: skip
Ran = tuple[Case, CaseResult]


def happened(design: Design, case: Case, result: CaseResult, strength: int) -> set[Combination]:
    """The combinations of values that came about in a case that was run to its end."""
    if result.error is not None:
        return set()
    absent = lacking(case.values, result.counts)
    found = design.covered([case.values], strength)
    return {combination for combination in found if not any(name in absent for name, _ in combination)}


def pairs_missing(design: Design, ran: Iterable[Ran]) -> set[Combination]:
    """The valid pairs that came about in no case."""
    missing = set(design.combinations(2))
    for case, result in ran:
        missing -= happened(design, case, result, 2)
    return missing


def coverage_of(
    design: Design, cases: Sequence[Case], results: Mapping[str, CaseResult], positions_planned: int, *, triples: bool
) -> dict[str, Any]:
    """The report's ``coverage``. A combination counts as covered only if each of its values came about."""
    ran = [(case, results[case.id]) for case in cases if case.id in results]
    pairs, missing = set(design.combinations(2)), pairs_missing(design, ran)
    found: dict[str, Any] = {
        "cases_planned": len(cases),
        "cases_run": len(ran),
        "positions": sum(result.positions for _, result in ran),
        "positions_planned": positions_planned,
        "drafted_positions": sum(result.counts.drafted_positions for _, result in ran),
        "pairs_total": len(pairs),
        "pairs_covered": len(pairs) - len(missing),
        "pairs_missing": [
            {"pair": _text(pair), "reason": _reason(pair, ran)}
            for pair in sorted(missing, key=_text)
        ],
        "factors": {
            factor.name: {value: sum(case.values[factor.name] == value for case, _ in ran) for value in factor.values}
            for factor in design.factors
        },
        "happened": _counted(design, ran, 1),
        "pairs_happened": _counted(design, ran, 2),
        "left_out": [constraint.reason for constraint in design.constraints],
    }  # fmt: skip
    if triples:
        wanted = set(design.combinations(3, DANGEROUS))
        covered = set[Combination]()
        for case, result in ran:
            covered |= happened(design, case, result, 3)
        found["dangerous_factors"] = list(DANGEROUS)
        found["triples_total"] = len(wanted)
        found["triples_covered"] = len(wanted & covered)
    return found


def _counted(design: Design, ran: Iterable[Ran], strength: int) -> dict[str, dict[str, int]]:
    """By combination: the cases that name it, those in which it came about, and what was counted in the latter."""
    found: dict[str, dict[str, int]] = {}
    for case, result in ran:
        came = happened(design, case, result, strength)
        for combination in design.covered([case.values], strength):
            sums = found.setdefault(
                _text(combination), dict.fromkeys(("cases", "came_about", "positions", *COUNTED), 0)
            )
            sums["cases"] += 1
            if combination in came:
                sums["came_about"] += 1
                sums["positions"] += result.positions
                for name in COUNTED:
                    sums[name] += getattr(result.counts, name)
    return found


def _reason(pair: Combination, ran: Iterable[Ran]) -> str:
    """Why a pair did not come about."""
    named = [(case, result) for case, result in ran if all(case.values[name] == value for name, value in pair)]
    if not named:
        return "no case was run"
    reasons: dict[str, None] = {}
    for case, result in named:
        if result.error is not None:
            reasons["a case could not be run"] = None
        for name, reason in lacking(case.values, result.counts).items():
            if name in dict(pair):
                reasons[reason] = None
    return f"in {len(named)} cases: {', '.join(reasons)}"


def _text(combination: Combination) -> str:
    return ", ".join(f"{name} {value}" for name, value in combination)
