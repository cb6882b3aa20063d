"""One failed case of a report: where it first differs, side by side, and how to run it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from bench.verify.html_matrix import SIGNS, anchor, status_of
from bench.verify.markup import Html, caption, element, visible

_KINDS = {
    "token": "another token",
    "logprob": "the same token with another logprob",
    "length": "another length",
    "finish_reason": "another finish reason",
}
PLAIN, SPECULATIVE = "plain decoding", "speculative"


def failure(case: Mapping[str, Any]) -> Html:
    """The case's article: its factors, the first divergence, the step's batch, the replay command."""
    status = status_of(case)
    _, sign, word = SIGNS[status]
    divergence: Mapping[str, Any] = case.get("divergence") or {}
    parts: list[Html] = [
        element("h3", f"{sign} {case.get('id')} ", word),
        element("p", case.get("reason") or "no reason was recorded", class_="reason"),
        factor_list(case.get("factors") or {}),
    ]
    if divergence:
        parts += _divergence(divergence)
    replay = divergence.get("replay") or case.get("replay")
    if replay:
        parts += [element("h4", "Run exactly this case again"), command(str(replay))]
    return element("article", *parts, id=anchor(case), class_="error-case" if status == "error" else None)


def factor_list(factors: Mapping[str, Any]) -> Html:
    items = [element("li", f"{name} ", element("b", str(value))) for name, value in factors.items()]
    return element("ul", *items, class_="factors")


def command(text: str) -> Html:
    """A command to copy: one click or one triple click selects it."""
    return element("pre", element("code", text))


def ids_text(ids: Sequence[Any]) -> str:
    return " ".join(str(i) for i in ids) if ids else "none"


def _divergence(divergence: Mapping[str, Any]) -> list[Html]:
    kind = str(divergence.get("kind"))
    place = divergence.get("output_index")
    request = divergence.get("request")
    parts = [
        element("h4", "First divergence"),
        element("p", f"Request {request}, output index {place}: {_KINDS.get(kind, kind)}."),
        _tokens(divergence),
    ]
    tops = [(PLAIN, divergence.get("expected_top") or []), (SPECULATIVE, divergence.get("got_top") or [])]
    if any(top for _, top in tops):
        parts.append(_tops(tops, place))
    if divergence.get("step_batch"):
        parts.append(_step_batch(divergence["step_batch"], request))
    return parts


def _tokens(divergence: Mapping[str, Any]) -> Html:
    """A row for each output index of the window, both sides next to each other, the first difference marked."""
    expected, got = list(divergence.get("expected") or []), list(divergence.get("got") or [])
    texts = (list(divergence.get("expected_tokens") or []), list(divergence.get("got_tokens") or []))
    start = int(divergence.get("window_start") or 0)
    place = divergence.get("output_index")
    first = next((i for i, (a, b) in enumerate(zip_longest(expected, got)) if a != b), None)
    if first is None and isinstance(place, int):
        first = place - start  # equal ids: the logprob or the end differs
    rows = []
    for i in range(max(len(expected), len(got))):
        differs = (expected[i] if i < len(expected) else None) != (got[i] if i < len(got) else None)
        sign = "\u2192 " if i == first else "\u2260 " if differs else ""
        rows.append(
            element(
                "tr",
                element("th", f"{sign}{start + i}", scope="row", class_="number"),
                *_side(expected, texts[0], i, "plainside"),
                *_side(got, texts[1], i, "specside"),
                class_="first" if i == first else None,
            )
        )
    head = (
        element(
            "tr",
            element("th", "output index", scope="col", rowspan=2, class_="wrap"),
            element("th", PLAIN, scope="colgroup", colspan=2),
            element("th", SPECULATIVE, scope="colgroup", colspan=2),
        ),
        element("tr", *_heads("id", "text", "id", "text")),
    )
    title = (
        "The two token sequences around it: \u2192 the first difference, \u2260 what follows from it. "
        "Marks stand for white space and invisible characters."
    )
    return _table(title, head, rows, "tokens")


def _side(ids: Sequence[Any], texts: Sequence[Any], i: int, class_: str) -> list[Html]:
    if i >= len(ids):
        return [element("td", "", class_=f"id {class_}"), element("td", element("i", "(ended)"), class_="token")]
    text = visible(str(texts[i])) if i < len(texts) else element("i", "(text not recorded)")
    return [element("td", str(ids[i]), class_=f"id {class_}"), element("td", text, class_="token")]


def _tops(tops: Sequence[tuple[str, Sequence[Any]]], place: Any) -> Html:
    rows = []
    for side, top in tops:
        cells: list[Html] = []
        for i in range(2):
            entry = list(top[i]) if i < len(top) else []
            cells += [
                element("td", str(entry[0]) if entry else "", class_="number"),
                element("td", visible(str(entry[2])) if len(entry) > 2 else "", class_="token"),
                element("td", _number(entry[1]) if len(entry) > 1 else "", class_="number"),
            ]
        gap = _number(top[0][1] - top[1][1]) if len(top) > 1 and _numbers(top[0][1], top[1][1]) else ""
        rows.append(element("tr", element("th", side, scope="row"), *cells, element("td", gap, class_="number")))
    head = (
        element(
            "tr",
            element("th", "side", scope="col", rowspan=2),
            element("th", "highest logit", scope="colgroup", colspan=3),
            element("th", "second", scope="colgroup", colspan=3),
            element("th", "gap", scope="col", rowspan=2),
        ),
        element("tr", *_heads("id", "text", "logit", "id", "text", "logit")),
    )
    return _table(f"The two highest raw logits at output index {place}, on both sides.", head, rows)


def _step_batch(batch: Sequence[Mapping[str, Any]], request: Any) -> Html:
    rows = []
    for item in batch:
        here = item.get("request") == request
        drafts = list(item.get("drafts") or [])
        accepted = item.get("accepted")
        rows.append(
            element(
                "tr",
                element("th", f"{item.get('request')}{' (this one)' if here else ''}", scope="row"),
                element("td", _plain(item.get("num_computed")), class_="number"),
                element("td", _plain(item.get("num_tokens")), class_="number"),
                element("td", ids_text(drafts), class_="ids"),
                element("td", f"{accepted} of {len(drafts)}" if accepted is not None else "", class_="number"),
                class_="here" if here else None,
            )
        )
    head = (element("tr", *_heads("request", "num_computed", "known tokens", "draft ids", "accepted")),)
    return _table("The batch of the step that emitted it: what ran beside it.", head, rows)


def _heads(*names: str) -> list[Html]:
    texts = ("request", "text", "draft ids")
    return [element("th", name, scope="col", class_=None if name in texts else "number") for name in names]


def _table(title: str, head: Sequence[Html], rows: Sequence[Html], class_: str | None = None) -> Html:
    table = element("table", caption(title), element("thead", *head), element("tbody", *rows), class_=class_)
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=title)


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _number(value: Any) -> str:
    """All digits that a float32 can tell apart: a near tie shows in the last ones."""
    return f"{value:.9g}" if _numbers(value) else _plain(value)
