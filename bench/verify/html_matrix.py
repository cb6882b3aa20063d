"""The matrix of a report: every value of every factor against the batch sizes, readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.verify.markup import Html, caption, element, join

COLUMN_FACTOR = "batch"
# status: (class, sign, word)
SIGNS = {
    "passed": ("passed", "\u2713", "passed"),
    "failed": ("failed", "\u2717", "failed"),
    "error": ("error", "!", "error"),
    "not run": ("notrun", "\u25cb", "not run"),
}
Case = Mapping[str, Any]


def status_of(case: Case) -> str:
    """One of SIGNS; an unknown status counts as an error, never as passed."""
    status = str(case.get("status"))
    return status if status in SIGNS else "error"


def anchor(case: Case) -> str:
    """The id of the case's part of the page, for links."""
    return "case-" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}" for c in str(case.get("id")))


def matrix(cases: Sequence[Case], factors: Mapping[str, Mapping[str, Any]]) -> Html:
    """A table: a group of rows for each factor but the batch size, a column for each batch size and for all of them.

    ``factors`` are the report's coverage: values that no case has are shown as empty rows.
    """
    values = factor_values(cases, factors)
    columns = values.pop(COLUMN_FACTOR, [])
    head = (
        element(
            "tr",
            element("th", "factor and value", scope="col", rowspan=2),
            element("th", "batch size", scope="colgroup", colspan=max(1, len(columns))),
            element("th", "all", scope="col", rowspan=2),
        ),
        element("tr", *(element("th", column, scope="col") for column in columns)),
    )
    bodies = [_body("all cases", [("every case", list(cases))], columns)]
    for factor, names in values.items():
        rows = [(name, [case for case in cases if _value(case, factor) == name]) for name in names]
        bodies.append(_body(factor, rows, columns))
    return element(
        "div",
        element(
            "table",
            caption(
                "Each cell: result, number of cases, compared positions. A case counts in one row of every factor.",
            ),
            element("thead", *head),
            *bodies,
            class_="matrix",
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label="Matrix of factor values and batch sizes",
    )


def legend() -> Html:
    """What the signs of a cell mean."""
    texts = {
        "passed": "all its cases passed",
        "failed": "a case failed; the cell counts these and leads to the first",
        "error": "a case could not be compared",
        "not run": "some were not run; the cell counts these",
    }
    items = [element("li", f"{SIGNS[status][1]} ", text, class_=SIGNS[status][0]) for status, text in texts.items()]
    return element("ul", *items, element("li", "\u00b7 no case has both values"), class_="legend")


def factor_values(cases: Sequence[Case], factors: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Every factor with its values, in the order of the coverage, then of the cases; numbers ascending."""
    found: dict[str, dict[str, None]] = {str(name): dict.fromkeys(map(str, values)) for name, values in factors.items()}
    for case in cases:
        for name, value in (case.get("factors") or {}).items():
            found.setdefault(str(name), {})[str(value)] = None
    return {name: _sorted(values) for name, values in found.items()}


def positions_text(count: int) -> str:
    """A number of positions in at most five characters: 812, 1.2k, 48k."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 10_000 else f"{count // 1000}k"


def _sorted(values: Iterable[str]) -> list[str]:
    listed = list(values)
    return sorted(listed, key=int) if all(v.isascii() and v.isdigit() for v in listed) else listed


def _value(case: Case, factor: str) -> str | None:
    factors = case.get("factors") or {}
    return str(factors[factor]) if factor in factors else None


def _body(factor: str, rows: Sequence[tuple[str, list[Case]]], columns: Sequence[str]) -> Html:
    group = element("tr", element("th", factor, scope="rowgroup", colspan=len(columns) + 2), class_="group")
    lines = []
    for name, cases in rows:
        cells = [
            _cell([c for c in cases if _value(c, COLUMN_FACTOR) == column], f"{factor} {name}, batch {column}")
            for column in columns
        ]
        lines.append(element("tr", element("th", name, scope="row"), *cells, _cell(cases, f"{factor} {name}")))
    return element("tbody", group, *lines)


def _cell(cases: Sequence[Case], label: str) -> Html:
    if not cases:
        return element("td", "\u00b7", class_="empty", title=f"{label}: no case")
    by_status = {status: [case for case in cases if status_of(case) == status] for status in SIGNS}
    worst = next(status for status in ("failed", "error", "not run", "passed") if by_status[status])
    class_, sign, _ = SIGNS[worst]
    count = len(by_status[worst])
    positions = sum(int(case.get("positions") or 0) for case in cases)
    told = ", ".join(f"{len(found)} {SIGNS[status][2]}" for status, found in by_status.items() if found)
    title = f"{label}: {len(cases)} cases, {positions:,} positions; {told}"
    if worst in ("failed", "error"):
        title += " (" + ", ".join(str(case.get("id")) for case in by_status[worst][:8]) + ")"
    shown = join(
        element("b", sign),
        str(count) if count == len(cases) else f"{count}/{len(cases)}",
        element("small", positions_text(positions)),
    )
    if worst in ("failed", "error"):
        shown = element("a", shown, href="#" + anchor(by_status[worst][0]))
    return element("td", shown, class_=class_, title=title)
