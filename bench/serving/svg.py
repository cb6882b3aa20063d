"""Plots as inline SVG: no script, colours by class, every value also as a tooltip and as text for screen readers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.verify.markup import Html, element, join

NUM_COLOURS = 8
_WIDTH, _HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 40
_BAR, _GAP, _LABEL = 16, 8, 190


@dataclass(frozen=True, slots=True)
class Point:
    """``low`` and ``high`` are a spread around ``value``."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """One point for each place on the axis; None where there is none. ``colour`` counts from 0."""

    name: str
    points: tuple[Point | None, ...]
    colour: int


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of segments: (name, share from 0 to 1, colour)."""

    label: str
    segments: tuple[tuple[str, float, int], ...]


def line_plot(
    title: str,
    unit: str,
    places: Sequence[str],
    series: Sequence[Series],
    axis: str,
    *,
    reference: float | None = None,
    most: float = 0.0,
) -> Html:
    """Values over ``places``, evenly spaced, from 0 to at least ``most``; spreads as upright lines, ``reference`` as a
    broken one."""
    values = [max(p.value, p.high or 0.0) for s in series for p in s.points if p is not None]
    top = _ceiling([*values, reference or 0.0, most])
    inner = _WIDTH - _LEFT - _RIGHT

    def x(i: int) -> float:
        return _LEFT + (inner * (i + 0.5) / len(places))

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1.0 - value / top)

    parts: list[Html] = [_grid(top, y), *(_text(x(i), _HEIGHT - _BOTTOM + 16, place) for i, place in enumerate(places))]
    parts.append(_text(_LEFT + inner / 2, _HEIGHT - 6, axis, class_="axis"))
    if reference is not None:
        parts.append(_line(_LEFT, y(reference), _WIDTH - _RIGHT, y(reference), "reference"))
    for number, one in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * 5.0  # spreads stand beside each other
        known = [(x(i) + shift, point, places[i]) for i, point in enumerate(one.points) if point is not None]
        path = " ".join(f"{'M' if i == 0 else 'L'}{a:.1f} {y(p.value):.1f}" for i, (a, p, _) in enumerate(known))
        parts.append(element("path", d=path, class_=f"line c{one.colour % NUM_COLOURS}"))
        for a, point, place in known:
            spread = ""
            if point.low is not None and point.high is not None:
                parts.append(_line(a, y(point.low), a, y(point.high), f"whisker c{one.colour % NUM_COLOURS}"))
                spread = f" ({point.low:.4g} to {point.high:.4g})"
            tip = f"{one.name}, {place}: {point.value:.4g} {unit}{spread}"
            parts.append(_dot(a, y(point.value), one.colour, tip))
    return _figure(title, unit, _svg(_WIDTH, _HEIGHT, title, parts), [(s.name, s.colour) for s in series])


def range_plot(title: str, unit: str, places: Sequence[str], series: Sequence[Series], axis: str) -> Html:
    """Bars up to ``value`` with a line up to ``high``: medians with their tails."""
    top = _ceiling([max(p.value, p.high or 0.0) for s in series for p in s.points if p is not None])
    inner = _WIDTH - _LEFT - _RIGHT
    slot = inner / len(places)
    width = min(22.0, slot * 0.8 / max(1, len(series)))

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1.0 - value / top)

    parts: list[Html] = [_grid(top, y)]
    for i, place in enumerate(places):
        middle = _LEFT + slot * (i + 0.5)
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 16, place))
        for number, one in enumerate(series):
            point = one.points[i]
            if point is None:
                continue
            left = middle + (number - len(series) / 2) * width
            told = f"{point.value:.4g} {unit}"
            tip = f"{one.name}, {place}: " + (told if point.high is None else f"p50 {told}, p99 {point.high:.4g}")
            parts.append(_rect(left + 1, y(point.value), width - 2, y(0) - y(point.value), one.colour, tip))
            if point.high is not None:
                centre = left + width / 2
                parts += [
                    _line(centre, y(point.value), centre, y(point.high), "tail"),
                    _line(centre - 4, y(point.high), centre + 4, y(point.high), "tail"),
                ]
    parts.append(_text(_LEFT + inner / 2, _HEIGHT - 6, axis, class_="axis"))
    return _figure(title, unit, _svg(_WIDTH, _HEIGHT, title, parts), [(s.name, s.colour) for s in series])


def stacked_bars(title: str, stacks: Sequence[Stack], *, whole: float = 1.0) -> Html:
    """Horizontal bars of shares; ``whole`` is the share at the right end."""
    height = len(stacks) * (_BAR + _GAP) + _GAP + 18
    inner = _WIDTH - _LABEL - 40
    parts: list[Html] = []
    names: dict[str, int] = {}
    for row, stack in enumerate(stacks):
        top = _GAP + row * (_BAR + _GAP)
        parts.append(_text(_LABEL - 8, top + 12, stack.label, class_="row"))
        left = float(_LABEL)
        for name, share, colour in stack.segments:
            names.setdefault(name, colour)
            width = inner * share / whole
            if width > 0.05:
                parts.append(_rect(left, top, width, _BAR, colour, f"{stack.label}: {name} {share:.2%}"))
            left += width
        told = sum(share for _, share, _ in stack.segments)
        if whole < 1.0:
            parts.append(_text(left + 4, top + 12, f"{told:.1%}", class_="end"))
    bottom = height - 18
    for share in (0.0, 0.5, 1.0):
        at = _LABEL + inner * share
        parts.append(_line(at, _GAP / 2, at, bottom, "grid"))
        parts.append(_text(at, height - 4, f"{share * whole:.3g}" if whole < 0.01 else f"{share * whole:.0%}"))
    return _figure(title, "", _svg(_WIDTH, height, title, parts), list(names.items()))


def _figure(title: str, unit: str, drawing: Html, names: Sequence[tuple[str, int]]) -> Html:
    shown = f"{title}, {unit}" if unit else title
    keys = [element("li", element("i", class_=f"key c{colour % NUM_COLOURS}"), name) for name, colour in names if name]
    return element(
        "figure",
        element("figcaption", shown),
        element("ul", *keys, class_="keys") if len(keys) > 1 else None,
        drawing,
    )


def _svg(width: float, height: float, title: str, parts: Sequence[Html]) -> Html:
    return element("svg", element("title", title), *parts, viewBox=f"0 0 {width:g} {height:g}", role="img")


def _grid(top: float, y: Callable[[float], float]) -> Html:
    lines: list[Html] = []
    for i in range(5):
        value = top * i / 4
        at = y(value)
        lines += [_line(_LEFT, at, _WIDTH - _RIGHT, at, "grid"), _text(_LEFT - 6, at + 4, _short(value), class_="tick")]
    return join(*lines)


def _rect(x: float, y: float, width: float, height: float, colour: int, tip: str) -> Html:
    return element(
        "rect", element("title", tip), x=f"{x:.1f}", y=f"{y:.1f}", width=f"{max(0.0, width):.1f}",
        height=f"{max(0.0, height):.1f}", class_=f"area c{colour % NUM_COLOURS}",
    )  # fmt: skip


def _dot(x: float, y: float, colour: int, tip: str) -> Html:
    return element("circle", element("title", tip), cx=f"{x:.1f}", cy=f"{y:.1f}", r="3.5",
                   class_=f"dot c{colour % NUM_COLOURS}")  # fmt: skip


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return element("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)


def _text(x: float, y: float, text: str, class_: str = "place") -> Html:
    return element("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_)


def _ceiling(values: Sequence[float]) -> float:
    """A round number, divisible by four at a glance, that is not below any of ``values``."""
    most = max(values, default=0.0)
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next(unit * step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if unit * step >= most * 0.999)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
