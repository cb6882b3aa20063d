"""report.html of ``truedraft bench``: one self-contained page, no script, made from report.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.serving.html_plots import workload_plots
from bench.serving.html_style import style_sheet
from bench.serving.html_table import counts_table, figures_table, sides_table, times_table
from bench.serving.table import missing_lines
from bench.verify.html import duration
from bench.verify.markup import Html, element, join

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_DASH = "\u2013"
Object = Mapping[str, Any]


def render(whole: Mapping[str, Any]) -> str:
    """The whole HTML page of a report (schema 1)."""
    results: Sequence[Object] = whole["results"]
    workloads = list(dict.fromkeys(one["truedraft"]["workload"] for one in results))
    body = join(
        element("h1", f"truedraft bench \u00b7 {_models(whole)}"),
        _verdict(whole),
        _facts(whole),
        _tiles(results),
        element("h2", "All figures", id="figures"),
        figures_table(results) if results else element("p", "Nothing was measured."),
        _missing(results),
        *(
            join(element("h2", f"Workload {name}", id=f"workload-{name}"), workload_plots(results, name))
            for name in workloads
        ),
        element("h2", "Times in detail", id="times"),
        times_table(results),
        sides_table(results),
        element("h2", "Requests", id="requests"),
        counts_table(results),
        _differences(whole),
        _how(whole),
        element(
            "footer",
            "Made by ",
            element("code", "truedraft bench"),
            f" from report.json, {whole['date']} UTC. All figures are those of this run and this machine.",
        ),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"truedraft bench: {_models(whole)}"),
        element("style", Html(style_sheet())),
    )
    return "<!doctype html>\n" + element("html", head, element("body", element("main", body)), lang="en") + "\n"


def _models(whole: Mapping[str, Any]) -> str:
    names = dict.fromkeys(str(target["model_path"] or target["model"]) for target in whole["targets"])
    return ", ".join(names) or "no model"


def _verdict(whole: Mapping[str, Any]) -> Html:
    equal, stopped = whole["equivalence"], whole["stopped"]
    if equal["different"]:
        sign, word, class_ = "\u2717", "Outputs differ", "failed"
    elif whole["failures"]:
        sign, word, class_ = "\u2717", "Requests failed", "failed"
    elif stopped:
        sign, word, class_ = "!", "Not whole", "error"
    elif equal["compared"]:
        sign, word, class_ = "\u2713", "Outputs alike", "passed"
    else:
        sign, word, class_ = "!", "Not compared", "notrun"
    parts = [
        f"{equal['compared'] - equal['different']:,} of {equal['compared']:,} outputs equal to the first of the same "
        "request, in every mode and round."
        if equal["compared"]
        else "No request was answered twice, so nothing could be compared."
    ]
    if whole["refused"] or whole["failures"]:
        parts.append(f"{whole['refused']:,} requests refused (503, 429), {whole['failures']:,} failed.")
    if stopped:
        parts.append(f"Stopped: {stopped}")
    return element("p", element("strong", f"{sign} {word}"), " ".join(parts), class_=f"verdict {class_}")


def _facts(whole: Mapping[str, Any]) -> Html:
    settings, machine = whole["settings"], whole["machine"]
    sampling = "greedy" if not settings["temperature"] else f"temperature {settings['temperature']:g}"
    facts: list[tuple[str, str]] = []
    for target in whole["targets"]:
        words = [str(target["model_path"] or target["model"])]
        words += [str(target[name]) for name in ("dtype", "exactness_level") if target[name]]
        where = target["started"] or f"{target['kind']} at {target['url']}"
        facts.append((target["name"], ", ".join([*words, where])))
    slos = ", ".join(settings["slos"])
    facts += [
        ("Requests", f"{settings['tokens']} output tokens, {sampling}, {settings['rounds']} rounds, "
                     f"{settings['api']}{f'; objectives {slos} (ms)' if slos else ''}"),
        ("Prompts", "; ".join(f"{name}: {one['prompts']} ({one['hash']})" for name, one in whole["workloads"].items())),
        ("Machine", ", ".join(str(v) for v in (machine.get("processor"), f"{machine.get('cpus')} processors",
                                               machine.get("platform")) if v)),
        ("Client", f"{machine.get('client')}; load average at the end {machine.get('load_average')}"),
        ("Took", duration(whole["seconds"])),
        ("Command", whole["command"]),
    ]  # fmt: skip
    return element(
        "dl", *(join(element("dt", name), element("dd", text)) for name, text in facts if text), class_="facts"
    )


def _tiles(results: Sequence[Object]) -> Html | None:
    """The seven, of one mode, from the lowest to the highest cell."""
    names = list(dict.fromkeys(one["truedraft"]["variant"] for one in results))
    if not names:
        return None
    sized = all(one["truedraft"]["block_size"] is not None for one in results)
    mode = "auto" if "auto" in names else names[-1]
    shown = "All block sizes" if sized else f"Mode {mode}"
    chosen = [one for one in results if sized or one["truedraft"]["variant"] == mode]
    ours = [one["truedraft"] for one in chosen]
    compared = sum(one["truedraft"]["equivalence"]["compared"] for one in results)
    different = sum(one["truedraft"]["equivalence"]["different"] for one in results)
    moved = [one["alignment"]["bytes_moved"] for one in ours if one.get("alignment")]
    align = [_get(one, "alignment", "rollback_share_of_step") for one in ours]
    build = [_get(one, "alignment", "build_share_of_step") for one in ours]
    overhead = [a + b for a, b in zip(align, build, strict=True) if a is not None and b is not None]
    last = _span([_get(one, "fragmentation", "last_block") for one in ours], "{:.1%}")
    gains = _span([_get(one, "ratio", "median") for one in ours], "{:.2f}")
    rates = [_get(one, "spread", "output_throughput", "median") for one in ours]
    tiles = [
        ("Output equivalence", f"{different} different", f"of {compared:,} compared, all modes"),
        (
            "Acceptance length",
            _span([_get(one, "acceptance", "length") for one in ours], "{:.2f}"),
            "1 + accepted / drafts",
        ),
        (
            "Draft cost",
            _span([_get(one, "draft_cost", "share_of_step") for one in ours], "{:.1%}"),
            "of the steps' time",
        ),
        ("ITL", _span([one["p50_itl_ms"] for one in chosen], "{:.3g}", " ms"), "median gap between chunks"),
        ("TTFT", _span([one["p50_ttft_ms"] for one in chosen], "{:.3g}", " ms"), "median, from the planned arrival"),
        (
            "Alignment overhead",
            f"{sum(moved)} B moved" if moved else _DASH,
            f"rollback and building: {_span(overhead, '{:.2%}')} of the steps' time",
        ),
        (
            "KV fragmentation",
            _span([_get(one, "fragmentation", "draft") for one in ours], "{:.1%}"),
            f"draft reserve; last blocks {last}",
        ),
        (
            "Throughput",
            _span(rates, "{:.3g}"),
            "output tokens/s" + (f"; {gains} times the first mode" if gains != _DASH else ""),
        ),
    ]
    return join(
        element("p", f"{shown}, from the lowest to the highest cell:", class_="soft"),
        element(
            "div",
            *(
                element("div", element("span", name), element("b", value), element("span", note), class_="tile")
                for name, value, note in tiles
            ),
            class_="tiles",
        ),
    )


def _span(values: Sequence[float | None], form: str, unit: str = "") -> str:
    """``low\u2013high``, one number if they look alike, a dash if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return _DASH
    low, high = form.format(min(known)), form.format(max(known))
    return f"{low}{unit}" if low == high else f"{low}\u2013{high}{unit}"


def _get(one: Mapping[str, Any], *path: str) -> Any:
    found: Any = one
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _missing(results: Sequence[Object]) -> Html | None:
    lines = missing_lines(results)
    if not lines:
        return None
    return join(
        element("h3", "What could not be measured, and why"), element("ul", *(element("li", line) for line in lines))
    )


def _differences(whole: Mapping[str, Any]) -> Html | None:
    equal = whole["equivalence"]
    if not equal["different"]:
        return None
    return join(
        element("h2", "Outputs that differ", id="differences"),
        element("p", f"{equal['different']:,} of {equal['compared']:,}; the first {len(equal['differences'])}:"),
        element("pre", "\n".join(equal["differences"])),
    )


def _how(whole: Mapping[str, Any]) -> Html:
    lines = (
        "Every round sends the same requests in every mode, in turns; each round takes the next prompts. A request's "
        "seed and prompt are the same in all modes, so its outputs have to be equal.",
        "Times are of the client: TTFT and E2E from the planned arrival (in an open loop whether or not the request "
        "could be sent then), ITL one value for each gap between two chunks with tokens, however many tokens they "
        "hold, TPOT (last - first chunk) / (tokens - 1).",
        "Percentiles are of all requests of all rounds, linear between ranks. Throughput is the median of the rounds; "
        "a ratio is the median of the ratios within a round, with a 95 % bootstrap interval.",
        "Acceptance, drafting, alignment, fragmentation and prefix hits are the growth of the server's own metrics "
        "around each run.",
    )
    return join(element("h2", "How it was measured", id="how"), *(element("p", line) for line in lines))
