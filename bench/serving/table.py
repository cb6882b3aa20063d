"""The one table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEADINGS = (
    "load", "mode", "tok/s", "[least, most]", "x first [95 %]", "TTFT ms", "ITL ms", "TPOT ms", "E2E ms", "queue",
    "acc.len", "draft", "align", "moved", "KV: draft/last/res.", "hits", "good", "equal",
)  # fmt: skip
EMPTY = ("draft", "last_block", "reserved")  # slots
LEGEND = (
    "tok/s: output tokens a second, median of the rounds; x first: over the first mode in the same round; times: "
    "p50/p90/p99 of all requests;",
    "acc.len: 1 + accepted / drafts; draft, align: drafting, and rollback with batch building, as shares of the steps' "
    "time; moved: KV bytes copied to align;",
    "KV: empty slots of the allocated ones, reserved for drafts, in last blocks, reserved for known tokens; hits: of "
    "the prefix cache; good: requests within every --slo; equal: outputs alike.",
)


def table(objects: Sequence[Mapping[str, Any]]) -> str:
    """A block for each workload; ``-`` where there is nothing to tell."""
    rows: list[tuple[str, ...] | str] = []
    workload = None
    for one in objects:
        if one["truedraft"]["workload"] != workload:
            workload = one["truedraft"]["workload"]
            rows.append(f"\n{workload}")
        rows.append(_row(one))
        lost = {**one["truedraft"]["refused"], **one["truedraft"]["failures"]}
        if lost:
            refused, failed = (sum(one["truedraft"][name].values()) for name in ("refused", "failures"))
            rows.append(f"    {refused} refused (503, 429), {failed} failed: " + "; ".join(
                f"{count} x {reason}" for reason, count in lost.items()
            ))  # fmt: skip
    used = [i for i in range(len(HEADINGS)) if any(not isinstance(row, str) and row[i] != "-" for row in rows)]
    cells = [HEADINGS, *(row for row in rows if not isinstance(row, str))]
    widths = {i: max(len(row[i]) for row in cells) for i in used}

    def line(row: Sequence[str]) -> str:
        return "  ".join(row[i].ljust(widths[i]) if i < 2 else row[i].rjust(widths[i]) for i in used).rstrip()

    return "\n".join([line(HEADINGS), *(row if isinstance(row, str) else line(row) for row in rows)])


def missing_lines(objects: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which figures a server does not have, each said once."""
    said: dict[str, None] = {}
    for one in objects:
        ours = one["truedraft"]
        for figure, why in ours["missing"].items():
            said[f"{ours['target']}: no {figure}: {why}"] = None
    return list(said)


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    ours = one["truedraft"]
    spread, ratio = ours["spread"].get("output_throughput"), ours["ratio"]
    equal, align, fragments = ours["equivalence"], ours.get("alignment"), ours.get("fragmentation")
    compared = equal["compared"]
    overhead = None if align is None else _add(align["rollback_share_of_step"], align["build_share_of_step"])
    return (
        ours["load"]["text"],
        ours["variant"],
        number(spread and spread["median"], ".1f"),
        f"[{spread['low']:.1f}, {spread['high']:.1f}]" if spread else "-",
        f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-",
        *(three(one, name) for name in ("ttft", "itl", "tpot", "e2el")),
        number(ours["queue_ms"] and ours["queue_ms"]["p50"], ".1f"),
        number(ours["acceptance"] and ours["acceptance"]["length"], ".2f"),
        number((ours.get("draft_cost") or {}).get("share_of_step"), ".1%"),
        number(overhead, ".2%"),
        "-" if align is None else f"{align['bytes_moved']} B",
        "-"
        if fragments is None
        else "/".join(f"{fragments[name]:.1%}" for name in ("draft", "last_block", "reserved")),
        number(ours.get("prefix_hit_rate") if ours["block_size"] is not None else None, ".0%"),
        number(ours["good_share"], ".0%"),
        f"{compared - equal['different']}/{compared}" if compared else "-",
    )


def three(one: Mapping[str, Any], name: str) -> str:
    """``p50/p90/p99``."""
    values = [one[f"p{q}_{name}_ms"] for q in (50, 90, 99)]
    return "/".join("-" if value is None else _short(value) for value in values) if values[0] is not None else "-"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _add(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
