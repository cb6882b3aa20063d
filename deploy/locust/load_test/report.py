"""The figures of a run, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TITLES = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E", "late": "late start"}
_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """A few tables, milliseconds; ``report`` is what --report writes."""
    total = report["total"]
    lines = [
        f"{report['loop']} loop, {total['seconds']:.1f} s: " + _requests(total),
        f"{_shown(total['tokens_per_second'])} output tokens/s, {_shown(total['requests_per_second'])} requests/s, "
        f"{_shown(total['tokens']['per_chunk'])} tokens a chunk",
        *(f"  {count:>7} {reason}" for reason, count in total["reasons"].items()),
        "",
        *_times(total, report["server"]),
    ]
    if report["server"] is not None:
        lines += ["", *_server(report["server"])]
    if len(report["classes"]) > 1:
        lines += ["", *_table("class", report["classes"])]
    if report["steps"]:
        lines += ["", *_table("users", {str(step["users"]): step["figures"] for step in report["steps"]})]
    if report["slo"]:
        lines.append("")
        for line in report["slo"]:
            value = "not measured" if line["value"] is None else f"{line['value']:.4g}"
            lines.append(f"{'met   ' if line['met'] else 'MISSED'} {line['objective']}: {value}")
    return lines


def _requests(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in figures["requests"].items() if count or name == "ended")


def _times(figures: Mapping[str, Any], server: Mapping[str, Any] | None) -> list[str]:
    rows = [["ms", *_COLUMNS, "server's mean"]]
    for key, title in _TITLES.items():
        times = figures[key]
        if not times["count"] or (key == "late" and not times["max"]):
            continue
        told = (server or {}).get(key)
        cells = [str(times["count"]), *(_ms(times[column]) for column in _COLUMNS[1:])]
        rows.append([title, *cells, _ms(None if told is None else told["mean"])])
    return _aligned(rows)


def _server(server: Mapping[str, Any]) -> list[str]:
    if server["restarted"]:
        return ["the server was restarted during the run: it says nothing that can be used"]
    counts, acceptance = server["counts"], server["acceptance"]
    lines = [
        f"the server: acceptance length {_shown(acceptance['length'])}, rate {_shown(acceptance['rate'])}; queue "
        f"{_ms(server['queue']['mean'])} ms; cache hits {_shown(server['cache_hit_rate'])}; "
        f"{_shown(counts['preemptions'])} preemptions"
    ]
    if server["rejections"]:
        lines.append("  rejected: " + ", ".join(f"{n:,} {reason}" for reason, n in server["rejections"].items()))
    return lines


def _table(head: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    titles = [head, "ended", "shed", "failed", "requests/s", "tokens/s"]
    titles += ["TTFT p95 ms", "ITL p95 ms", "TPOT ms", "acceptance"]
    cells = []
    for name, figures in rows.items():
        requests = figures["requests"]
        cells.append(
            [
                name,
                *(str(requests[key]) for key in ("ended", "shed", "failed")),
                _shown(figures["requests_per_second"]),
                _shown(figures["tokens_per_second"]),
                _ms(figures["ttft"]["p95"]),
                _ms(figures["itl"]["p95"]),
                _ms(figures["tpot"]["mean"]),
                _shown(figures["acceptance"]["length"]),
            ]
        )
    return _aligned([titles, *cells])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
