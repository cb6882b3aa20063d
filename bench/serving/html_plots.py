"""The plots of one workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.serving.svg import Point, Series, Stack, line_plot, range_plot, stacked_bars
from bench.verify.markup import Html, element, join

Object = Mapping[str, Any]
_STAGES = ("verify", "draft", "accept", "build", "rollback", "sync")
_SLOTS = (("draft", "draft reserve"), ("last_block", "last blocks"), ("reserved", "known tokens"))


def workload_plots(results: Sequence[Object], workload: str) -> Html:
    """Everything that was measured of it: over the loads, or over the block sizes if these are what differs."""
    mine = [one for one in results if one["truedraft"]["workload"] == workload]
    parts: list[Html] = []
    for kind, heading, axis in (
        ("closed", "Closed loop", "requests at a time"),
        ("open", "Open loop, random arrivals", "requests a second"),
    ):
        of_kind = [one for one in mine if one["truedraft"]["load"]["kind"] == kind]
        if of_kind:
            sized = all(one["truedraft"]["block_size"] is not None for one in of_kind)
            plots = _over_sizes(of_kind) if sized else _over_loads(of_kind, axis)
            parts += [element("h3", heading), element("div", *plots, class_="plots")]
    return join(*parts)


def _over_loads(mine: Sequence[Object], axis: str) -> list[Html]:
    places = list(dict.fromkeys(one["truedraft"]["load"]["short"] for one in mine))
    return _plots(mine, places, lambda one: one["truedraft"]["load"]["short"], lambda one: one["truedraft"]["variant"],
                  axis)  # fmt: skip


def _over_sizes(mine: Sequence[Object]) -> list[Html]:
    places = list(dict.fromkeys(str(one["truedraft"]["block_size"]) for one in mine))

    def series(one: Object) -> str:
        return f"{one['truedraft']['mode']}, {one['truedraft']['load']['text']}"

    plots = _plots(mine, places, lambda one: str(one["truedraft"]["block_size"]), series, "block size")
    hits = _series(mine, places, lambda one: str(one["truedraft"]["block_size"]), series, _hit_rate)
    return [*plots, *([line_plot("Prefix cache hit rate", "%", places, hits, "block size", most=100)] if hits else [])]


def _plots(
    mine: Sequence[Object],
    places: Sequence[str],
    place_of: Callable[[Object], str],
    series_of: Callable[[Object], str],
    axis: str,
) -> list[Html]:
    def series(read: Callable[[Object], Point | None]) -> list[Series]:
        return _series(mine, places, place_of, series_of, read)

    plots: list[Html] = []
    throughput = series(_throughput)
    if throughput:
        plots.append(line_plot("Throughput", "output tokens/s", places, throughput, axis))
    ratios = series(_ratio)
    if ratios:
        base = next(one["truedraft"]["ratio"]["over"] for one in mine if one["truedraft"]["ratio"])
        plots.append(line_plot(f"Throughput over {base}", "times", places, ratios, axis, reference=1.0))
    for title, name in (("Inter-token latency (ITL)", "itl"), ("Time to first token (TTFT)", "ttft"),
                        ("Time per output token (TPOT)", "tpot")):  # fmt: skip
        found = series(lambda one, name=name: _tail(one, name))  # type: ignore[misc]
        if found:
            plots.append(range_plot(f"{title}: p50, line to p99", "ms", places, found, axis))
    acceptance = series(_acceptance)
    if acceptance:
        plots.append(range_plot("Acceptance length", "tokens", places, acceptance, axis))
    good = series(lambda one: _share(one, "good_share"))
    if good:
        plots.append(line_plot("Requests within the objectives", "%", places, good, axis, most=100))
    steps = [
        Stack(_label(one, series_of, place_of), tuple((s, shares.get(s, 0.0), i) for i, s in enumerate(_STAGES)))
        for one in mine
        if (shares := (one["truedraft"].get("step") or {}).get("shares"))
    ]
    if steps:
        plots.append(stacked_bars("Where the steps' time goes", steps))
    fragments = [
        Stack(
            _label(one, series_of, place_of),
            tuple((shown, found[name], i) for i, (name, shown) in enumerate(_SLOTS)),
        )
        for one in mine
        if (found := one["truedraft"].get("fragmentation"))
    ]
    if fragments:
        most = max(sum(share for _, share, _ in stack.segments) for stack in fragments)
        plots.append(stacked_bars("Empty slots of the allocated KV blocks", fragments, whole=_round_up(most)))
    return plots


def _series(
    mine: Sequence[Object],
    places: Sequence[str],
    place_of: Callable[[Object], str],
    series_of: Callable[[Object], str],
    read: Callable[[Object], Point | None],
) -> list[Series]:
    """Colours belong to names, so a mode has the same in every plot; a series without any point is left out."""
    names = list(dict.fromkeys(series_of(one) for one in mine))
    made = []
    for colour, name in enumerate(names):
        points = {place_of(one): read(one) for one in mine if series_of(one) == name}
        if any(point is not None for point in points.values()):
            made.append(Series(name, tuple(points.get(place) for place in places), colour))
    return made


def _throughput(one: Object) -> Point | None:
    spread = one["truedraft"]["spread"].get("output_throughput")
    return None if spread is None else Point(spread["median"], spread["low"], spread["high"])


def _ratio(one: Object) -> Point | None:
    ratio = one["truedraft"]["ratio"]
    return None if ratio is None else Point(ratio["median"], ratio["low"], ratio["high"])


def _tail(one: Object, name: str) -> Point | None:
    value = one[f"p50_{name}_ms"]
    return None if value is None else Point(value, high=one[f"p99_{name}_ms"])


def _acceptance(one: Object) -> Point | None:
    length = (one["truedraft"]["acceptance"] or {}).get("length")
    return None if length is None else Point(length)


def _share(one: Object, name: str) -> Point | None:
    value = one["truedraft"].get(name)
    return None if value is None else Point(100 * value)


def _hit_rate(one: Object) -> Point | None:
    return _share(one, "prefix_hit_rate")


def _label(one: Object, series_of: Callable[[Object], str], place_of: Callable[[Object], str]) -> str:
    return f"{place_of(one)}: {series_of(one)}"


def _round_up(share: float) -> float:
    return next((step for step in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if share <= step), 1.0)
