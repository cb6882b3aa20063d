"""deploy/ holds to the code and the docs: alert rules that parse, ask for metrics that exist and say what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.preflight.checklist import alerts_line
from scheduler.audit import AUDIT_RESULTS
from server.metrics import PREFIX, Metrics
from specdec.drafters.registry import DRAFTER_NAMES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "truedraft.rules.yml"
TESTS = FOLDER / "truedraft.rules.test.yml"


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def samples() -> dict[str, dict[str, set[str]]]:
    """Every sample that a server can have: its name, and the values of each of its labels."""
    metrics = Metrics(
        model_name="m",
        max_speculative_tokens=4,
        exactness_level=0,
        cache_config={"block_size": 16, "num_blocks": 64, "enable_prefix_cache": True, "cache_dtype": "bfloat16"},
        audits=True,
        drafters=DRAFTER_NAMES,
    )
    found: dict[str, dict[str, set[str]]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                found.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return found


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_prometheus_loads_the_rules() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
    assert [FOLDER / name for name in config["rule_files"]] == [RULES]
    assert yaml.safe_load(TESTS.read_text("utf-8"))["rule_files"] == [RULES.name]


@pytest.mark.parametrize("name", sorted(alerts()))
def test_an_alert_asks_only_for_metrics_and_labels_that_exist(name: str) -> None:
    known, expression = samples(), alerts()[name]["expr"]
    asked = re.findall(rf"({PREFIX}\w+)(?:\{{([^}}]*)\}})?", expression)
    assert asked
    for metric, matchers in asked:
        assert metric in known
        for label, value in re.findall(r'(\w+)="([^"]*)"', matchers):
            assert value in known[metric][label]
    assert set(AUDIT_RESULTS) == known[f"{PREFIX}equivalence_audits_total"]["result"]


@pytest.mark.parametrize("name", sorted(alerts()))
def test_an_alert_says_what_it_is_and_what_to_do(name: str) -> None:
    alert = alerts()[name]
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description", "action", "runbook"}
    assert all(text.strip() for text in alert["annotations"].values())
    file, _, anchor = alert["annotations"]["runbook"].partition("#")
    headings = {slug(heading): heading for heading in re.findall(r"(?m)^#+ (.*)$", (ROOT / file).read_text("utf-8"))}
    assert f'"{headings[anchor]}"' in alert["annotations"]["action"]


def test_every_alert_has_a_test() -> None:
    tested = TESTS.read_text("utf-8")
    assert all(name in tested for name in alerts())


def test_preflight_finds_the_alert_of_a_checkout() -> None:
    line = alerts_line(FOLDER)
    assert line.answer == "yes"
    assert "TruedraftOutputMismatch" in line.reason


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
@pytest.mark.parametrize("command", [["check", "config", "prometheus.yml"], ["test", "rules", TESTS.name]])
def test_promtool_agrees(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
