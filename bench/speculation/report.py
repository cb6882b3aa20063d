"""The cells as JSON objects and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.json_numbers import rounded
from bench.speculation.cells import Cell, CellResult, Size
from bench.speculation.figures import compared, single
from bench.speculation.forwards import ForwardTimes
from bench.speculation.modes import OFF
from bench.speculation.runs import Run

HEADINGS = (
    "mode", "k", "tokens/s", "TPOT ms", "x tokens/s", "[95 %]", "x TPOT", "[95 %]", "bound", "acc. len", "tok/step",
    "draft", "verify", "other", "repeats", "x without", "bar",
)  # fmt: skip
LEGEND = (
    "x tokens/s: over off, median of the pairs and its bootstrap interval; x TPOT: TPOT of off / TPOT, likewise;",
    "bound: (k + 1) t(B) / t(B (k + 1)) of forwards, for auto that of the best k; acc. len: 1 + accepted / drafts;",
    "tok/step: tokens of a sequence in a decode step; draft, verify, other: shares of the steps' time;",
    "repeats: outputs in which 8 tokens in a row occur twice; x without: x tokens/s of the other outputs.",
)


def cell_objects(
    results: Sequence[CellResult], forwards: ForwardTimes, size: Size, common: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One object a cell, ``off`` first: its runs in all pairs of the same workload, concurrency and temperature."""
    objects = []
    for place in dict.fromkeys(_place(result.cell) for result in results):
        here = [result for result in results if _place(result.cell) == place and result.pairs]
        workload, concurrency, temperature = place
        shared = {"workload": workload, "concurrency": concurrency, "temperature": temperature}
        sizes = {"tokens": size.tokens, "requests": size.requests(concurrency)}
        off = [pair.off for result in here for pair in (*result.first, *result.pairs)]
        if off:
            objects.append(rounded({**shared, "mode": OFF, "k": 0, **_off(off), **sizes, **common}, 5))
        for result in here:
            objects.append(rounded({**shared, **_mode(result, forwards), **sizes, **common}, 5))
    return objects


def _off(runs: Sequence[Run]) -> dict[str, Any]:
    return {**single(runs), "runs": len(runs)}


def _mode(result: CellResult, forwards: ForwardTimes) -> dict[str, Any]:
    cell, mode = result.cell, result.cell.mode
    if mode.adaptive:
        best = forwards.best_bound(cell.concurrency, mode.k)
    else:
        value = forwards.bound(cell.concurrency, mode.k)
        best = None if value is None else (value, mode.k)
    return {
        "mode": mode.name,
        "k": mode.k,
        **compared(result.pairs),
        "bound": best and best[0],
        "bound_k": best and best[1],
        "bar": None if result.held is None else "held" if result.held else "missed",
        "first_attempt": compared(result.first) if result.first else None,
        "different_outputs": result.num_different,
        "note": result.note,
    }


def table(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects of :func:`cell_objects` for people: a block for each workload, temperature and concurrency."""
    rows: list[tuple[str, ...] | str] = []
    place = None
    for one in sorted(objects, key=lambda one: (one["workload"], one["temperature"], one["concurrency"])):
        here = (one["workload"], one["temperature"], one["concurrency"])
        if here != place:
            how = "greedy" if not one["temperature"] else f"temperature {one['temperature']:g}"
            rows.append(f"{one['workload']}, {how}, concurrency {one['concurrency']}")
            place = here
        rows.append(_row(one))
        if one.get("first_attempt"):
            rows.append(_row({**one, **one["first_attempt"], "mode": "  (first)", "bar": "missed"}))
    cells = [HEADINGS, *(row for row in rows if not isinstance(row, str))]
    widths = [max(len(row[i]) for row in cells) for i in range(len(HEADINGS))]

    def line(row: tuple[str, ...]) -> str:
        return "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])

    text = [line(HEADINGS)]
    for row in rows:
        text.append(f"\n{row}" if isinstance(row, str) else line(row).rstrip())
    return "\n".join(text)


def acceptance_lines(objects: Sequence[Mapping[str, Any]], most: int = 8) -> list[str]:
    """How far drafts are accepted: for each cell with drafts, the share that reaches positions 1, 2, .."""
    lines = []
    for one in objects:
        shares = one["acceptance_by_position"][:most]
        if shares:
            how = "greedy" if not one["temperature"] else f"{one['temperature']:g}"
            name = f"{one['workload']} {one['concurrency']} {how} {one['mode']}"
            lines.append(f"  {name:<28} " + " ".join(f"{share:.2f}" for share in shares))
    return lines


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    ratio, tpot, without = one.get("ratio"), one.get("tpot_ratio"), one.get("without_repeats")
    shares = one["shares"]
    clean = without and without["ratio"]
    return (
        one["mode"],
        "" if one["mode"] == OFF else f"<={one['k']}" if one["mode"] == "auto" else str(one["k"]),
        f"{one['tokens_per_s']:.1f}",
        _number(one["tpot_ms"], ".1f"),
        _number(ratio and ratio["median"], ".2f"),
        _range(ratio),
        _number(tpot and tpot["median"], ".2f"),
        _range(tpot),
        _number(one.get("bound"), ".2f"),
        f"{one['acceptance_length']:.2f}" if one["mode"] != OFF else "",
        f"{one['tokens_per_step']:.2f}",
        f"{shares['draft']:.0%}",
        f"{shares['verify']:.0%}",
        f"{shares['other']:.0%}",
        f"{one['repeating_share']:.0%}",
        _number(clean and clean["median"], ".2f") if one["mode"] != OFF else "",
        one.get("bar") or "",
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _range(interval: Mapping[str, float] | None) -> str:
    return f"[{interval['low']:.2f}, {interval['high']:.2f}]" if interval else ""


def _place(cell: Cell) -> tuple[str, int, float]:
    return cell.workload, cell.concurrency, cell.temperature
