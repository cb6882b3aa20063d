"""The tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.verify.markup import Html, caption, element, join

Object = Mapping[str, Any]
_NONE = "\u2013"


@dataclass(frozen=True, slots=True)
class _Column:
    group: str
    name: str
    cell: Callable[[Object], str]


def figures_table(results: Sequence[Object]) -> Html:
    """All seven figures and throughput, a row for each cell and variant."""
    columns = (
        _Column("throughput", "tokens/s", lambda o: _of(o, ".1f", "spread", "output_throughput", "median")),
        _Column("throughput", "x first [95 %]", _ratio),
        _Column("throughput", "good", lambda o: _of(o, ".0%", "good_share")),
        _Column("1 equivalence", "equal", _equal),
        _Column("2 acceptance", "length", lambda o: _of(o, ".2f", "acceptance", "length")),
        _Column("2 acceptance", "rate", lambda o: _of(o, ".0%", "acceptance", "rate")),
        _Column("3 draft cost", "of step", lambda o: _of(o, ".1%", "draft_cost", "share_of_step")),
        _Column("3 draft cost", "rejected", lambda o: _of(o, ".1%", "draft_cost", "rejected_rows_share")),
        _Column("4 ITL ms", "p50", lambda o: _top(o, "p50_itl_ms")),
        _Column("4 ITL ms", "p99", lambda o: _top(o, "p99_itl_ms")),
        _Column("5 TTFT ms", "p50", lambda o: _top(o, "p50_ttft_ms")),
        _Column("5 TTFT ms", "p99", lambda o: _top(o, "p99_ttft_ms")),
        _Column("6 alignment", "moved", lambda o: _of(o, "d", "alignment", "bytes_moved", unit=" B")),
        _Column("6 alignment", "rollback", lambda o: _of(o, ".2%", "alignment", "rollback_share_of_step")),
        _Column("6 alignment", "building", lambda o: _of(o, ".2%", "alignment", "build_share_of_step")),
        _Column("7 KV fragmentation", "drafts", lambda o: _of(o, ".2%", "fragmentation", "draft")),
        _Column("7 KV fragmentation", "last blocks", lambda o: _of(o, ".2%", "fragmentation", "last_block")),
        _Column("7 KV fragmentation", "known", lambda o: _of(o, ".2%", "fragmentation", "reserved")),
    )
    return _table(
        "Rejected: of all rows of the steps. KV fragmentation: empty slots of the allocated ones, in blocks for drafts "
        "alone, in last blocks, in blocks for known tokens.",
        columns,
        results,
    )


def times_table(results: Sequence[Object]) -> Html:
    """Mean and percentiles of everything that a client can time."""
    columns = []
    for name, heading in (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2el", "E2E")):
        for q, shown in (("mean", "mean"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99")):
            columns.append(_Column(f"{heading} ms", shown, _field(f"{q}_{name}_ms")))
    for q in ("p50", "p90", "p99"):
        columns.append(_Column("queue ms", q, _nested(".3g", "queue_ms", q)))
    columns.append(_Column("chunks", "tokens a chunk", _nested(".2f", "tokens_per_chunk")))
    columns.append(_Column("late start ms", "p99", _nested(".2f", "late_start_ms", "p99")))
    return _table("All requests of all rounds, in milliseconds.", columns, results)


def sides_table(results: Sequence[Object]) -> Html | None:
    """Means of the client beside those of the server's metrics."""
    if not any(one["truedraft"].get("server_times_ms") for one in results):
        return None
    columns = []
    for name, heading in (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2el", "E2E")):
        columns.append(_Column(f"{heading} ms", "client", _field(f"mean_{name}_ms")))
        columns.append(_Column(f"{heading} ms", "server", _nested(".4g", "server_times_ms", name, "mean")))
    columns.append(_Column("output tokens", "client", lambda o: f"{o['total_output_tokens']:,}"))
    columns.append(_Column("output tokens", "server", lambda o: _of(o, ",.0f", "generation_tokens")))
    text = "Means of both sides: what lies between them is the network, HTTP and the client's own delay."
    return _table(text, columns, results)


def counts_table(results: Sequence[Object]) -> Html:
    """How many, how fast, and what was lost."""
    columns = (
        _Column("requests", "answered", lambda o: f"{o['completed']:,}"),
        _Column("requests", "refused", lambda o: f"{sum(o['truedraft']['refused'].values()):,}"),
        _Column("requests", "failed", lambda o: f"{sum(o['truedraft']['failures'].values()):,}"),
        _Column("requests", "a second", lambda o: _top(o, "request_throughput")),
        _Column("requests", "good a second", lambda o: _top(o, "request_goodput")),
        _Column("tokens/s", "least, most", lambda o: _pair(_get(o, "spread", "output_throughput"), ".1f")),
        _Column("tokens", "in", lambda o: f"{o['total_input_tokens']:,}"),
        _Column("tokens", "out", lambda o: f"{o['total_output_tokens']:,}"),
        _Column("tokens", "in + out a second", lambda o: _top(o, "total_token_throughput")),
        _Column("prefix cache", "hit rate", lambda o: _of(o, ".1%", "prefix_hit_rate")),
        _Column("server", "preemptions", lambda o: _of(o, ".0f", "preemptions")),
        _Column("server", "mean draft", lambda o: _of(o, ".2f", "draft_length")),
        _Column("server", "rows a step", lambda o: _of(o, ".1f", "step", "rows")),
        _Column("server", "ms a step", lambda o: _of(o, ".1f", "step", "ms")),
    )
    lost = []
    for one in results:
        ours = one["truedraft"]
        for reason, count in {**ours["refused"], **ours["failures"]}.items():
            lost.append(f"{ours['workload']}, {ours['load']['text']}, {ours['variant']}: {count} x {reason}")
    return join(
        _table("Of all rounds.", columns, results),
        element("ul", *(element("li", line) for line in lost)) if lost else None,
    )


def _table(text: str, columns: Sequence[_Column], results: Sequence[Object]) -> Html:
    shown = [one for one in columns if any(one.cell(result) != _NONE for result in results)] or list(columns)[:1]
    groups: list[list[_Column]] = []
    for one in shown:
        if groups and groups[-1][0].group == one.group:
            groups[-1].append(one)
        else:
            groups.append([one])
    first = {group[0].name + group[0].group for group in groups}
    heads = [element("th", group[0].group, scope="colgroup", colspan=len(group)) for group in groups]
    names = [element("th", one.name, scope="col", class_=_class(one, first)) for one in shown]
    rows: list[Html] = []
    place = None
    for result in results:
        ours = result["truedraft"]
        here = (ours["workload"], ours["load"]["text"])
        if here != place:
            place = here
            rows.append(
                element(
                    "tr",
                    element("th", f"{here[0]}, {here[1]}", scope="rowgroup", colspan=len(shown) + 1),
                    class_="cell",
                )
            )
        cells = [_cell(one, result, first) for one in shown]
        rows.append(element("tr", element("th", ours["variant"], scope="row"), *cells))
    table = element(
        "table",
        caption(text),
        element(
            "thead",
            element("tr", element("th", "mode", rowspan=2, scope="col"), *heads, class_="group"),
            element("tr", *names),
        ),
        element("tbody", *rows),
        class_="figures",
    )
    return element("div", table, class_="scroll", tabindex=0)


def _cell(column: _Column, result: Object, first: set[str]) -> Html:
    class_ = _class(column, first)
    if column.name == "equal":
        equal = result["truedraft"]["equivalence"]
        class_ += " bad" if equal["different"] else " fine" if equal["compared"] else ""
    if column.name in ("failed",) and result["truedraft"]["failures"]:
        class_ += " bad"
    return element("td", column.cell(result), class_=class_)


def _class(column: _Column, first: set[str]) -> str:
    return "number first" if column.name + column.group in first else "number"


def _get(one: Object, *path: str) -> Any:
    found: Any = one["truedraft"]
    for name in path:
        if not isinstance(found, Mapping) or found.get(name) is None:
            return None
        found = found[name]
    return found


def _of(one: Object, form: str, *path: str, unit: str = "") -> str:
    value = _get(one, *path)
    return _NONE if value is None else f"{format(value, form)}{unit}"


def _nested(form: str, *path: str) -> Callable[[Object], str]:
    return lambda one: _of(one, form, *path)


def _field(name: str) -> Callable[[Object], str]:
    return lambda one: _top(one, name)


def _top(one: Object, name: str) -> str:
    value = one.get(name)
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _pair(spread: Mapping[str, float] | None, form: str) -> str:
    return _NONE if spread is None else f"{format(spread['low'], form)}, {format(spread['high'], form)}"


def _ratio(one: Object) -> str:
    ratio = _get(one, "ratio")
    return _NONE if ratio is None else f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _equal(one: Object) -> str:
    equal = one["truedraft"]["equivalence"]
    if not equal["compared"]:
        return "not compared"
    return f"{equal['compared'] - equal['different']}/{equal['compared']}"
