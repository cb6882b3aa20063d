"""What a run found: JSON with the field names of ``vllm bench serve``, and tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.peers.agreement import Cell
from bench.peers.rounds import CellResult, PeersRun
from bench.serving.figures import client_figures, round_figures

OURS = "truedraft"
LOWER = ("mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms", "p99_itl_ms")
COLUMNS = (
    "peer", "speculation", "tokens/s", "lowest", "highest", "TTFT", "p50", "p99", "ITL", "p99", "TPOT",
    "= without spec.", "= alone", "= again", "common start",
)  # fmt: skip


def cell_records(run: PeersRun) -> list[dict[str, Any]]:
    """One object for each peer, speculation and cell."""
    fewest = {
        workload: min(r.cell.seats for r in run.results if r.cell.workload == workload)
        for workload in {r.cell.workload for r in run.results}
    }
    return [_record(run, result, fewest[result.cell.workload]) for result in run.results]


def _record(run: PeersRun, result: CellResult, fewest: int) -> dict[str, Any]:
    way, cell, outputs = result.way, result.cell, run.outputs
    who = (way.peer, way.speculation, cell)
    rounds = [round_figures(one) for one in result.runs]
    rates = [one["output_throughput"] for one in rounds]
    return {
        "peer": way.peer,
        "speculation": way.speculation,
        "over_http": way.over_http,
        "workload": cell.workload,
        "max_concurrency": cell.seats,
        "command": list(result.launch.command),
        "environment": dict(result.launch.environment),
        "settings": result.launch.settings or None,
        **client_figures(result.runs, ()),
        "median_output_throughput": statistics.median(rates),
        "lowest_output_throughput": min(rates),
        "highest_output_throughput": max(rates),
        "rounds": rounds,
        "equal_without_speculation": outputs.with_speculation(*who).as_json(),
        "equal_alone": outputs.in_a_batch(*who, fewest).as_json(),
        "equal_again": outputs.again(*who).as_json(),
        "common_start_with_ours": None if way.peer == OURS else outputs.common_start(way.peer, OURS, cell),
    }


def comparisons(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each cell and each kind of ours (plain, auto): against the best peer, plain against plain, and against the
    best of all their kinds. Ratios are of medians; their range is that of the slowest round over the other's fastest,
    and the other way round. Times are compared with the lowest that any of the same peers has."""
    found = []
    for cell in dict.fromkeys(Cell(r["workload"], r["max_concurrency"]) for r in records):
        here = [r for r in records if (r["workload"], r["max_concurrency"]) == (cell.workload, cell.seats)]
        ours, peers = [r for r in here if r["peer"] == OURS], [r for r in here if r["peer"] != OURS]
        for mine in ours:
            for against, rivals in (("plain", [r for r in peers if r["speculation"] == "off"]), ("best", peers)):
                if not rivals:
                    continue
                best = max(rivals, key=lambda r: float(r["median_output_throughput"]))
                found.append(
                    {
                        "workload": cell.workload,
                        "max_concurrency": cell.seats,
                        "ours": mine["speculation"],
                        "against": against,
                        "peer": best["peer"],
                        "peer_speculation": best["speculation"],
                        "ratio": mine["median_output_throughput"] / best["median_output_throughput"],
                        "ratio_low": mine["lowest_output_throughput"] / best["highest_output_throughput"],
                        "ratio_high": mine["highest_output_throughput"] / best["lowest_output_throughput"],
                        **{f"{name}_ratio": _times(mine, rivals, name) for name in LOWER},
                    }
                )
    return found


def _times(mine: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Ours over the lowest; below 1 is better. None where one has no such time (ITL of one token)."""
    known = [float(r[name]) for r in rivals if r[name]]
    return float(mine[name]) / min(known) if known and mine[name] is not None else None


def cell_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table for each cell, as docs/performance.md has them. Times in milliseconds."""
    parts = []
    for cell in dict.fromkeys(Cell(r["workload"], r["max_concurrency"]) for r in records):
        here = [r for r in records if (r["workload"], r["max_concurrency"]) == (cell.workload, cell.seats)]
        rows = [_row(r) for r in sorted(here, key=lambda r: -float(r["median_output_throughput"]))]
        parts.append(f"**{cell.workload}, {cell.seats} at a time**\n\n{_markdown(COLUMNS, rows)}")
    return "\n\n".join(parts)


def comparison_table(found: Sequence[Mapping[str, Any]]) -> str:
    columns = (
        "workload", "at a time", "ours", "against", "x tokens/s", "range", "x TTFT", "x p99 TTFT", "x ITL", "x p99 ITL",
    )  # fmt: skip
    rows = [
        (
            f["workload"],
            str(f["max_concurrency"]),
            f["ours"],
            f"{f['against']}: {f['peer']}, {f['peer_speculation']}",
            f"{f['ratio']:.2f}",
            f"{f['ratio_low']:.2f} to {f['ratio_high']:.2f}",
            *(_number(f[f"{name}_ratio"], 2) for name in LOWER),
        )
        for f in found
    ]
    return _markdown(columns, rows)


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        record["peer"] + ("" if record["over_http"] else " (in process)"),
        record["speculation"],
        *(f"{record[f'{which}_output_throughput']:.1f}" for which in ("median", "lowest", "highest")),
        *(_number(record[f"{which}_ttft_ms"], 0) for which in ("mean", "median", "p99")),
        *(_number(record[f"{which}_itl_ms"], 1) for which in ("mean", "p99")),
        _number(record["mean_tpot_ms"], 1),
        *(_share(record[f"equal_{which}"]) for which in ("without_speculation", "alone", "again")),
        _number(record["common_start_with_ours"], 0),
    )


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _share(count: Mapping[str, int] | None) -> str:
    return "-" if count is None else f"{count['equal']} of {count['compared']}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
