"""A board: rows of panels, laid out from left to right, with the variables and links that all boards share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.grafana.boards.panels import DATASOURCE, Json, Panel
from deploy.grafana.boards.queries import PREFIX, PROCESSES

COLUMNS = 24
SCHEMA_VERSION = 39  # Grafana 10.4 and newer; newer ones migrate it when they load it
TAG = "truedraft"
JOBS = "truedraft.*"  # as the rules have it
KNOWN = f"{PREFIX}num_requests_running"  # every server has it from its start on


def alerts(severity: str = ".+") -> str:
    """Those that fire: about one server, about a service (no instance), or about none at all (no job)."""
    about = 'job=~"$job|", instance=~"$instance|"'
    return f'ALERTS{{alertname=~"Truedraft.+", alertstate="firing", severity=~"{severity}", {about}}}'


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    name: str  # of its file, and in its address
    title: str
    description: str
    rows: Sequence[Row]
    refresh: str = "10s"

    def json(self) -> Json:
        return {
            "uid": f"truedraft-{self.name}",
            "title": f"Truedraft / {self.title}",
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "timezone": "browser",
            "time": {"from": "now-1h", "to": "now"},
            "refresh": self.refresh,
            "graphTooltip": 1,  # one crosshair for all panels
            "links": [_links()],
            "annotations": {"list": [_marks()]},
            "templating": {"list": _variables()},
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[Json]:
        number, y = 1, 0
        for row in self.rows:
            yield {
                "id": number,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y},
                "panels": [],
            }
            number, y, x, height = number + 1, y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, height = 0, y + height, 0
                yield panel.json(number, x, y)
                number, x, height = number + 1, x + panel.width, max(height, panel.height)
            y += height


def _links() -> Json:
    """To the other boards, with what is chosen here."""
    return {
        "type": "dashboards",
        "tags": [TAG],
        "title": "",
        "tooltip": "",
        "icon": "external link",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _marks() -> Json:
    """When alerts fired, on every panel."""
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": alerts(),
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}} {{instance}}",
    }


def _variables() -> list[Json]:
    return [
        {
            "type": "datasource",
            "name": "datasource",
            "label": "Data source",
            "description": "The Prometheus that scrapes the servers and has the rules of deploy/prometheus.",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
            "multi": False,
            "includeAll": False,
            "regex": "",
            "options": [],
        },
        # All jobs are those that the rules know, not those that were found: after an hour without any server none is
        # found, and a board that then says "0 down" would lie.
        _values_of("job", "Job", KNOWN, every=JOBS),
        _values_of("model_name", "Model", f'{KNOWN}{{job=~"$job"}}', every=".+"),
        _values_of("instance", "Instance", f"up{{{PROCESSES.split(',')[0]}}}", every=".+"),
    ]


def _values_of(label: str, title: str, series: str, *, every: str) -> Json:
    """``every``: the regex that stands for all values."""
    query = f"label_values({series}, {label})"
    return {
        "type": "query",
        "name": label,
        "label": title,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,  # when the time range changes: servers come and go
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "regex": "",
        "options": [],
        "allValue": every,
    }
