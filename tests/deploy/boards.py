"""The committed boards, and the queries in them as Prometheus gets them from Grafana."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
NAMES = ("service", "speculation", "kv-cache", "equivalence")
# What Grafana puts in with every choice at "All".
VARIABLES = {
    "$__rate_interval": "20s",
    "$__range": "1m",
    "$job": "truedraft.*",
    "$model_name": ".+",
    "$instance": ".+",
}


@dataclass(frozen=True)
class BoardQuery:
    board: str
    panel: str
    written: str
    legend: str

    @property
    def asked(self) -> str:
        return substitute(self.written)

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}"


def board(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return loaded


def panels(name: str) -> list[dict[str, Any]]:
    """Rows left out."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def queries() -> Iterator[BoardQuery]:
    """Of every panel, and of the marks."""
    for name in NAMES:
        for panel in panels(name):
            for target in panel["targets"]:
                yield BoardQuery(name, panel["title"], target["expr"], target["legendFormat"])
        for mark in board(name)["annotations"]["list"]:
            yield BoardQuery(name, mark["name"], mark["expr"], mark["textFormat"])


def variable_queries() -> Iterator[BoardQuery]:
    """The series behind ``label_values(series, label)``; ``legend`` is the label."""
    for name in NAMES:
        for variable in board(name)["templating"]["list"]:
            if variable["type"] == "query":
                series, _, label = variable["definition"].removeprefix("label_values(")[:-1].rpartition(", ")
                yield BoardQuery(name, variable["name"], series, label)


def substitute(query: str) -> str:
    """As Prometheus gets it. Raises ValueError if a variable is left."""
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    if "$" in query:
        raise ValueError(f"an unknown variable in {query}")
    return query
