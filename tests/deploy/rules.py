"""The committed rules of deploy/prometheus, and their tests."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
FILES = sorted(FOLDER.glob("*.rules.yml"))
TESTS = sorted(FOLDER.glob("*.rules.test.yml"))
SEVERITIES = ("critical", "warning", "info")


@cache
def _rules() -> tuple[dict[str, Any], ...]:
    groups = [group for file in FILES for group in yaml.safe_load(file.read_text("utf-8"))["groups"]]
    return tuple(rule for group in groups for rule in group["rules"])


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in _rules() if "alert" in rule}


def recorded() -> dict[str, str]:
    """Expressions by name."""
    return {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}


def expressions() -> dict[str, str]:
    """Of alerts and recording rules."""
    return {**{name: alert["expr"] for name, alert in alerts().items()}, **recorded()}


def labels_of_recorded(name: str) -> set[str]:
    """What its outermost sums keep; without any, what a scraped series of a server has."""
    kept = {label for by in re.findall(r"by \(([\w, ]*)\)", recorded()[name]) for label in by.split(", ")}
    return kept or {"job", "instance", "model_name", "engine"}
