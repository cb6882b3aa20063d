"""Panels of a board, each made once and turned into Grafana's JSON in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
TOKENS_A_SECOND = "suffix: tok/s"


@dataclass(frozen=True, slots=True)
class Query:
    """``legend`` may name labels, as ``{{instance}}``."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """``steps``: from which value on which colour, beginning with one that has no value; drawn as lines over time.

    ``idle``: what stands there if a query finds nothing, as where a denominator is 0.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str = "short"
    width: int = 8
    height: int = 8
    decimals: int | None = None
    minimum: float | None = None
    maximum: float | None = None
    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    words: Sequence[tuple[float, str, str]] = ()  # a value, the text that stands for it, its colour
    idle: str = ""

    kind = ""
    format = "time_series"
    instant = False

    def json(self, number: int, x: int, y: int) -> Json:
        defaults: Json = {
            "color": self._color(),
            "mappings": self._mappings(),
            "thresholds": {"mode": "absolute", "steps": [{"value": v, "color": c} for v, c in self.steps]},
            "unit": self.unit,
        }
        for name, value in (("decimals", self.decimals), ("min", self.minimum), ("max", self.maximum)):
            if value is not None:
                defaults[name] = value
        if self.idle:
            defaults["noValue"] = self.idle
        if custom := self._custom():
            defaults["custom"] = custom
        panel: Json = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": self._options(),
            "targets": [self._target(i, query) for i, query in enumerate(self.queries)],
        }
        if transformations := self._transformations():
            panel["transformations"] = transformations
        return panel

    def _target(self, index: int, query: Query) -> Json:
        return {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "format": self.format,
            "instant": self.instant,
            "range": not self.instant,
            "legendFormat": query.legend or "__auto",
        }

    def _mappings(self) -> list[Json]:
        if not self.words:
            return []
        results = {
            f"{value:g}": {"text": text, "color": color, "index": i}
            for i, (value, text, color) in enumerate(self.words)
        }
        return [{"type": "value", "options": results}]

    def _color(self) -> Json:
        return {"mode": "thresholds"}

    def _custom(self) -> Json:
        return {}

    def _options(self) -> Json:
        raise NotImplementedError

    def _transformations(self) -> list[Json]:
        return []


@dataclass(frozen=True, slots=True)
class Stat(Panel):
    """One number of now. It is asked as of now, too: the last value of a server that is gone must not stand there."""

    width: int = 3
    height: int = 4
    alarm: bool = False  # the whole field takes the colour
    kind = "stat"
    instant = True

    def _options(self) -> Json:
        return {
            "colorMode": "background" if self.alarm else "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "percentChangeColorMode": "standard",
            "reduceOptions": _last(),
            "showPercentChange": False,
            "textMode": "value",
            "wideLayout": True,
        }


@dataclass(frozen=True, slots=True)
class Lines(Panel):
    """Values over time."""

    stacked: bool = False
    kind = "timeseries"

    def _color(self) -> Json:
        return {"mode": "palette-classic"}

    def _custom(self) -> Json:
        return {
            "axisPlacement": "auto",
            "drawStyle": "line",
            "fillOpacity": 40 if self.stacked else 8,
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "scaleDistribution": {"type": "linear"},
            "showPoints": "auto",  # a series with gaps is not invisible
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if len(self.steps) > 1 else "off"},
        }

    def _options(self) -> Json:
        return {
            "legend": {"calcs": ["mean", "max", "lastNotNull"], "displayMode": "table", "placement": "bottom",
                       "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "none" if self.stacked else "desc"},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Heatmap(Panel):
    """The buckets of a histogram over time: how much was observed where."""

    kind = "heatmap"
    format = "heatmap"

    def _custom(self) -> Json:
        return {"scaleDistribution": {"type": "linear"}}

    def _options(self) -> Json:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Blues", "fill": "dark-blue", "scale": "exponential",
                      "exponent": 0.5, "steps": 64, "reverse": False},
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "showValue": "never",
            "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "reverse": False, "unit": self.unit},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bars(Panel):
    """Values of now, side by side."""

    kind = "bargauge"
    instant = True

    def _options(self) -> Json:
        return {
            "displayMode": "basic",
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
            "maxVizHeight": 300,
            "minVizHeight": 16,
            "minVizWidth": 8,
            "namePlacement": "auto",
            "orientation": "vertical",
            "reduceOptions": _last(),
            "showUnfilled": True,
            "sizing": "auto",
            "valueMode": "color",
        }


@dataclass(frozen=True, slots=True)
class States(Panel):
    """Which of a few values, over time; ``words`` say what each means."""

    kind = "state-timeline"

    def _custom(self) -> Json:
        return {"fillOpacity": 70, "lineWidth": 0}

    def _options(self) -> Json:
        return {
            "alignValue": "left",
            "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
            "mergeValues": True,
            "rowHeight": 0.9,
            "showValue": "auto",
            "tooltip": {"mode": "single", "sort": "none"},
        }


@dataclass(frozen=True, slots=True)
class Table(Panel):
    """A row for each set of labels; ``columns`` are the fields that stay, by name, in order, with their headings.

    The value of query A, B, ... is the field ``Value #A``, ...; of a single query it is ``Value``.
    """

    columns: Sequence[tuple[str, str]] = field(default=())
    kind = "table"
    format = "table"
    instant = True

    def _custom(self) -> Json:
        return {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False}

    def _options(self) -> Json:
        return {
            "cellHeight": "sm",
            "frameIndex": 0,
            "showHeader": True,
        }

    def _transformations(self) -> list[Json]:
        names = [name for name, _ in self.columns]
        merged = [{"id": "merge", "options": {}}] if len(self.queries) > 1 else []
        return [
            *merged,
            {"id": "filterFieldsByName", "options": {"include": {"names": names}}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {},
                    "indexByName": {name: i for i, name in enumerate(names)},
                    "renameByName": dict(self.columns),
                },
            },
        ]


def _last() -> Json:
    return {"calcs": ["lastNotNull"], "fields": "", "values": False}
