"""report.html of ``truedraft verify``: one self-contained page, no script, made from report.json alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.verify.html_failure import command, factor_list, failure, ids_text
from bench.verify.html_matrix import SIGNS, anchor, legend, matrix, status_of
from bench.verify.html_style import style_sheet
from bench.verify.markup import Html, caption, element, join

_LEVELS = {
    "L0": "pathwise: the request and its seed decide the token ids; speculation, batch mates, chunking, cache hits and "
    "preemption change nothing",
    "L1": "in distribution: the emitted law is the target's, the ids may differ from run to run",
    "L2": "greedy up to float ties: the ids are equal unless two logits nearly tie, because a forward's last bits "
    "depend on what else is in the batch",
    "L3": "lossy: the output may differ from the target's",
}


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(report: dict[str, Any]) -> str:
    """The whole HTML page of ``report`` (schema 1). Unknown keys are ignored, absent ones leave their part out."""
    cases: list[Mapping[str, Any]] = list(report.get("cases") or [])
    coverage: Mapping[str, Any] = report.get("coverage") or {}
    bad = [case for case in cases if status_of(case) in ("failed", "error")]
    state = verdict_of(report)
    model: Mapping[str, Any] = report.get("model") or {}
    title = f"truedraft verify: {_VERDICTS[state][1]}, {model.get('name', 'unknown model')}"
    body = join(
        element(
            "h1", f"truedraft verify {report.get('version') or ''} \u00b7 suite {report.get('suite') or 'unknown'}"
        ),
        _verdict(report, state, bad),
        _facts(report, model, coverage),
        element("h2", "Matrix", id="matrix"),
        matrix(cases, coverage.get("factors") or {}),
        legend(),
        _coverage(cases, coverage),
        _failures(bad),
        _reference(report.get("reference")),
        _level(model),
        _cases(cases),
        element(
            "footer",
            "Made by ",
            element("code", "truedraft verify"),
            " from report.json. The compared sides are plain autoregressive decoding and speculative decoding of the "
            "same engine: token ids, logprobs bit for bit, finish reasons.",
        ),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style_sheet())),
    )
    return "<!doctype html>\n" + element("html", head, element("body", element("main", body)), lang="en") + "\n"


_VERDICTS = {
    "passed": ("\u2713", "Passed", "passed"),
    "failed": ("\u2717", "Failed", "failed"),
    "interrupted": ("!", "Interrupted", "error"),
}


_REFERENCE_WORDS = {"failed": "found a difference", "error": "could not be compared"}


def verdict_of(report: Mapping[str, Any]) -> str:
    """ "passed", "failed" or "interrupted". Passed only if the report says so and nothing in it contradicts."""
    cases = report.get("cases") or []
    reference = report.get("reference") or {}
    if any(status_of(case) in ("failed", "error") for case in cases) or reference.get("status") in ("failed", "error"):
        return "failed"
    if report.get("interrupted"):
        return "interrupted"
    return "passed" if report.get("passed") is True and _positions(report) > 0 else "failed"


def _positions(report: Mapping[str, Any]) -> int:
    return int((report.get("coverage") or {}).get("positions") or 0)


def _verdict(report: Mapping[str, Any], state: str, bad: Sequence[Mapping[str, Any]]) -> Html:
    sign, word, class_ = _VERDICTS[state]
    model: Mapping[str, Any] = report.get("model") or {}
    reference = report.get("reference") or {}
    differing = sum(status_of(case) == "failed" for case in bad)
    facts = [
        f"{_positions(report):,} positions compared",
        _plural(differing, "case") + " with a difference" if differing else "0 differences",
    ]
    errors = len(bad) - differing
    if errors:
        facts.append(_plural(errors, "case") + " could not be compared")
    if reference and status_of(reference) in ("failed", "error"):
        facts.append(f"the reference run {_REFERENCE_WORDS[status_of(reference)]}")
    if report.get("near_ties"):
        facts.append(_plural(int(report["near_ties"]), "near tie"))
    facts += [
        str(model.get("name", "unknown model")),
        f"level {model.get('exactness_level', 'unknown')}",
        duration(report.get("seconds")).replace(" ", "\u00a0"),
    ]
    links: list[Html | str] = []
    for case in bad[:12]:
        links += [", " if links else "", element("a", str(case.get("id")), href="#" + anchor(case))]
    more = f" and {len(bad) - 12} more" if len(bad) > 12 else ""
    return element(
        "p",
        element("strong", f"{sign} {word}"),
        " \u00b7 ".join(facts),
        join(" \u00b7 see ", *links, more) if links else None,
        class_=f"verdict {class_}",
        role="status",
    )


def _facts(report: Mapping[str, Any], model: Mapping[str, Any], coverage: Mapping[str, Any]) -> Html:
    threads = model.get("num_threads")
    device = f"{model.get('device', 'unknown')}" + (f", {_plural(int(threads), 'thread')}" if threads else "")
    machine = report.get("machine") or {}
    left_out = report.get("drafters_left_out") or {}
    pairs = [
        ("model", f"{model.get('name', 'unknown')}, {model.get('dtype', 'unknown dtype')}"),
        ("draft", report.get("draft") or model.get("draft")),
        (
            "runs on",
            f"{device}; executor {model.get('executor', 'unknown')}, kernels {model.get('kernels', 'unknown')}",
        ),
        ("exactness level", _level_line(model)),
        ("left-out drafters", "; ".join(f"{name}: {reason}" for name, reason in left_out.items())),
        ("near ties", report.get("near_tie_rule")),
        ("fingerprint", model.get("fingerprint")),
        ("machine", ", ".join(f"{name} {value}" for name, value in machine.items())),
        ("started", report.get("started")),
        ("took", f"{duration(report.get('seconds'))} for {coverage.get('cases_run', 0)} cases"),
    ]
    listed = [(element("dt", name), element("dd", str(value))) for name, value in pairs if value]
    parts = element("dl", *(part for pair in listed for part in pair), class_="facts")
    return join(parts, command(str(report["command"])) if report.get("command") else None)


def _level_line(model: Mapping[str, Any]) -> str:
    level = str(model.get("exactness_level") or "unknown")
    detail = model.get("exactness_detail")
    return f"{level} ({detail})" if detail else level


def _coverage(cases: Sequence[Mapping[str, Any]], coverage: Mapping[str, Any]) -> Html:
    rows = [
        _progress("cases", coverage.get("cases_run"), coverage.get("cases_planned")),
        _progress("compared positions", coverage.get("positions"), coverage.get("positions_planned")),
        _progress("positions with drafts", coverage.get("drafted_positions"), coverage.get("positions")),
        _progress("pairs of factor values that came about", coverage.get("pairs_covered"), coverage.get("pairs_total")),
    ]
    if coverage.get("triples_total"):
        what = f"triples of the values of {', '.join(map(str, coverage.get('dangerous_factors') or ()))}"
        rows.append(_progress(what, coverage.get("triples_covered"), coverage["triples_total"]))
    drafted, accepted = (sum(int(case.get(key) or 0) for case in cases) for key in ("drafted", "accepted"))
    share = f"{accepted / drafted:.0%}" if drafted else "none"
    columns = [element("th", name, scope="col", class_="number") for name in ("done", "planned", "share")]
    head = element("tr", element("th", "what", scope="col"), *columns, element("td", ""))
    return join(
        element("h2", "Coverage", id="coverage"),
        element(
            "div",
            element("table", caption( "What was run of what was planned."), element("thead", head),
                    element("tbody", *rows)),
            class_="scroll",
        ),
        element(
            "p",
            f"The speculative side verified {drafted:,} draft tokens and accepted {accepted:,} of them ({share}), "
            f"so {drafted - accepted:,} were rejected and rolled back. "
            "Without both kinds, equality would prove little.",
        ),
        _left_out(coverage),
    )  # fmt: skip


def _left_out(coverage: Mapping[str, Any]) -> Html | None:
    absent = coverage.get("pairs_missing") or ()
    parts: list[Html] = []
    for title, lines in (
        ("Pairs that did not come about:", [f"{item.get('pair')}: {item.get('reason')}" for item in absent]),
        ("Pairs that cannot be, and are not counted:", list(coverage.get("left_out") or ())),
    ):
        if lines:
            items = [element("li", str(line)) for line in lines]
            parts += [element("p", title), element("ul", *items, class_="note")]
    return join(*parts) if parts else None


def _progress(what: str, done: Any, planned: Any) -> Html:
    share = int(done or 0) / int(planned) if planned else None
    bar = None
    if share is not None:
        filled = element("span", style=f"width: {min(100.0, 100 * share):.1f}%")
        bar = element("span", filled, class_="bar", aria_hidden="true")
    cells = [
        element("td", f"{int(done or 0):,}", class_="number"),
        element("td", f"{int(planned):,}" if planned else "", class_="number"),
        element("td", f"{100 * share:.1f} %" if share is not None else "", class_="number"),
        element("td", bar),
    ]
    return element("tr", element("th", what, scope="row"), *cells)


def _failures(bad: Sequence[Mapping[str, Any]]) -> Html:
    heading = element("h2", "Failures", id="failures")
    if not bad:
        return join(heading, element("p", "None."))
    return join(heading, *(failure(case) for case in bad))


def _reference(reference: Mapping[str, Any] | None) -> Html:
    heading = element("h2", "Reference run", id="reference")
    if reference is None:
        return join(heading, element("p", "Not run."))
    class_, sign, word = SIGNS[status_of(reference)]
    prompts, positions = int(reference.get("prompts") or 0), int(reference.get("positions") or 0)
    parts: list[Html] = [
        heading,
        element(
            "p",
            element("span", f"{sign} {word}", class_=class_),
            f" against {reference.get('what')}: {_plural(prompts, 'prompt')}, {positions:,} positions, "
            f"{_plural(int(reference.get('near_ties') or 0), 'near tie')}.",
        ),
    ]
    if reference.get("reason"):
        parts.append(element("p", str(reference["reason"])))
    if reference.get("near_tie_rule"):
        parts.append(element("p", f"Near-tie rule: {reference['near_tie_rule']}.", class_="note"))
    mismatches = reference.get("mismatches") or []
    if mismatches:
        parts.append(_mismatches(mismatches))
    return join(*parts)


def _mismatches(mismatches: Sequence[Mapping[str, Any]]) -> Html:
    names = ("prompt", "class", "speculation", "output index", "gap of the top two logits", "reference ids", "our ids")
    rows = []
    for item in mismatches:
        gap = item.get("gap")
        rows.append(
            element(
                "tr",
                element("th", str(item.get("prompt")), scope="row"),
                element("td", str(item.get("kind", ""))),
                element("td", str(item.get("speculation", ""))),
                element("td", str(item.get("output_index")), class_="number"),
                element("td", f"{gap:.3g}" if isinstance(gap, int | float) else "", class_="number"),
                element("td", ids_text(item.get("expected") or []), class_="ids"),
                element("td", ids_text(item.get("got") or []), class_="ids"),
            )
        )
    table = element(
        "table",
        caption("Where the reference says something else; a small gap is a near tie."),
        element("thead", element("tr", *(element("th", name, scope="col") for name in names))),
        element("tbody", *rows),
    )
    return element("div", table, class_="scroll")


def _level(model: Mapping[str, Any]) -> Html | None:
    level = str(model.get("exactness_level") or "")
    if level == "L0" or not level:
        return None
    return join(
        element("h2", f"What level {level} means", id="level"),
        element("p", f"{level} is {_LEVELS[level]}." if level in _LEVELS else f"{level} is not a known level."),
        element("p", f"Why this model is below L0: {model['exactness_detail']}")
        if model.get("exactness_detail")
        else None,
        element(
            "p",
            f"L0, which this model does not reach here, is {_LEVELS['L0']}. "
            "Below L0 a difference at a near tie is counted as such and is no failure.",
        ),
    )


def _cases(cases: Sequence[Mapping[str, Any]]) -> Html:
    names = ("case", "result", "requests", "positions", "drafted", "accepted", "near ties", "seconds", "factors")
    rows = []
    for case in cases:
        class_, sign, word = SIGNS[status_of(case)]
        linked = status_of(case) in ("failed", "error")
        name: Html | str = str(case.get("id"))
        numbers = [case.get(key) for key in ("requests", "positions", "drafted", "accepted", "near_ties")]
        seconds = case.get("seconds")
        rows.append(
            element(
                "tr",
                element("th", element("a", name, href="#" + anchor(case)) if linked else name, scope="row"),
                element("td", f"{sign} {word}", class_=class_),
                *(element("td", f"{int(number or 0):,}", class_="number") for number in numbers),
                element("td", f"{seconds:.1f}" if isinstance(seconds, int | float) else "", class_="number"),
                element("td", factor_list(case.get("factors") or {})),
            )
        )
    table = element(
        "table",
        caption("In the order in which they ran."),
        element("thead", element("tr", *(element("th", name, scope="col") for name in names))),
        element("tbody", *rows),
    )
    return element(
        "details",
        element("summary", f"All {len(cases)} cases"),
        element("div", table, class_="scroll"),
        id="cases",
    )


def duration(seconds: Any) -> str:
    """Seconds as a person says them: 0.8 s, 42 s, 5 min 1 s, 1 h 2 min."""
    if not isinstance(seconds, int | float):
        return "an unknown time"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
