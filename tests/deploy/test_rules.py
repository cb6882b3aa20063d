"""Alerts and recording rules: they ask for what exists, say what to do, and fire when they should and not otherwise."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.preflight.checklist import alerts_line
from scheduler.audit import AUDIT_RESULTS
from server.metrics.kinds import PREFIX
from server.metrics.schema import SCHEMA, label_values
from tests.deploy import boards, rules
from tests.deploy.prometheus import needs_promtool
from tests.deploy.promql import selectors, unguarded
from tests.deploy.settings_of import seconds_to_end, settings_of

ALERTS = sorted(rules.alerts())
TARGET = {"job", "instance"}  # of every scraped series


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def run(*command: str) -> None:
    done = subprocess.run(
        ["promtool", *command], cwd=rules.FOLDER, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_loads_every_file_of_rules() -> None:
    config = yaml.safe_load((rules.FOLDER / "prometheus.yml").read_text("utf-8"))
    loaded = {path for pattern in config["rule_files"] for path in rules.FOLDER.glob(pattern)}
    assert loaded == set(rules.FILES)
    assert rules.FILES


def test_every_file_of_rules_has_tests_and_is_in_that_of_a_healthy_service() -> None:
    loaded = {path.name: yaml.safe_load(path.read_text("utf-8"))["rule_files"] for path in rules.TESTS}
    assert set(loaded.pop("truedraft.healthy.rules.test.yml")) == {path.name for path in rules.FILES}
    assert loaded == {f"{path.name.removesuffix('.yml')}.test.yml": [path.name] for path in rules.FILES}


def test_names_of_rules_are_told_apart() -> None:
    files = "".join(path.read_text("utf-8") for path in rules.FILES)
    assert len(rules.expressions()) == len(re.findall(r"- (?:alert|record): ", files))


def test_rules_ask_only_for_metrics_and_labels_that_exist() -> None:
    known = label_values()
    for name, expression in rules.expressions().items():
        asked = selectors(expression)
        assert asked
        for selector in asked:
            if selector.name == "up":
                labels: dict[str, tuple[str, ...]] = {}
            elif selector.name in rules.recorded():
                labels = dict.fromkeys(rules.labels_of_recorded(selector.name), ())
            else:
                labels = known[selector.name]
            for label, op, value in selector.labels:
                assert label in labels or label in TARGET, f"{name}: {selector}"
                words = set(labels.get(label, ()))
                assert not words or set(value.split("|") if op == "=~" else [value]) <= words, f"{name}: {selector}"
    assert set(AUDIT_RESULTS) == set(known[f"{PREFIX}equivalence_audits_total"]["result"])


def test_no_rule_divides_by_what_can_be_0() -> None:
    assert [(name, found) for name, query in rules.expressions().items() if (found := unguarded(query))] == []


def test_a_bound_of_an_objective_is_one_of_the_buckets() -> None:
    """As the text format writes it: Prometheus compares strings."""
    asked = {
        (selector.name, value)
        for expression in rules.recorded().values()
        for selector in selectors(expression)
        for label, _, value in selector.labels
        if label == "le"
    }
    assert {name for name, _ in asked} == {
        f"{PREFIX}time_to_first_token_seconds_bucket",
        f"{PREFIX}inter_token_latency_seconds_bucket",
    }
    for name, value in asked:
        metric = SCHEMA[name.removeprefix(PREFIX).removesuffix("_bucket")]
        assert value in {str(float(bound)) for bound in metric.bounds(16)}


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_it_is_and_what_to_do(name: str) -> None:
    alert = rules.alerts()[name]
    assert alert["labels"]["severity"] in rules.SEVERITIES
    assert set(alert["annotations"]) == {"summary", "description", "action", "runbook_url"}
    assert all(text.strip() for text in alert["annotations"].values())


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_section_in_the_runbook_that_says_its_severity(name: str) -> None:
    alert = rules.alerts()[name]
    assert alert["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    page = (rules.ROOT / "docs" / "runbook.md").read_text("utf-8")
    assert f"\n## {name}\n" in page
    assert f"| [{name}](#{name.lower()}) | {alert['labels']['severity']} |" in page


def test_the_runbook_knows_no_other_alert() -> None:
    page = (rules.ROOT / "docs" / "runbook.md").read_text("utf-8")
    assert set(re.findall(r"(?m)^## (.*)$", page)) == set(ALERTS)
    assert set(re.findall(r"Truedraft[A-Z]\w+", page)) <= set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_action_names_sections_and_panels_that_exist(name: str) -> None:
    text = " ".join(rules.alerts()[name]["annotations"]["action"].split())
    for page, heading in re.findall(r'(docs/\w+\.md), "([^"]+)"', text):
        assert re.search(rf"(?m)^#+ {re.escape(heading)}$", (rules.ROOT / page).read_text("utf-8"))
    for board, title in re.findall(r'Board ([\w ]+), "([^"]+)"', text):
        file = board.lower().replace(" ", "-")
        assert title in {panel["title"] for panel in boards.panels(file)}


def test_the_runbook_names_panels_that_exist() -> None:
    page = (rules.ROOT / "docs" / "runbook.md").read_text("utf-8")
    titles = {panel["title"] for name in boards.NAMES for panel in boards.panels(name)}
    titles |= {board["title"] for board in map(boards.board, boards.NAMES)}
    names = {"Service", "Speculation", "KV cache", "Equivalence"}
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", page))
    assert named - titles - names == {"Status / Targets"}  # a page of Prometheus


@pytest.mark.parametrize("name", ALERTS)
def test_a_text_of_an_alert_uses_labels_that_its_result_has(name: str) -> None:
    alert = rules.alerts()[name]
    kept = [set(by.split(", ")) for by in re.findall(r"by \(([\w, ]*)\)", alert["expr"])]
    asked = {selector.name for selector in selectors(alert["expr"])}
    if alert["expr"].startswith("absent("):
        labels: set[str] = set()
    elif kept:
        labels = kept[0]
    elif asked == {"up"}:
        labels = TARGET
    else:
        labels = set.intersection(
            *(
                rules.labels_of_recorded(n) if n in rules.recorded() else TARGET | {"model_name", "engine"}
                for n in asked
            )
        )
    used = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
    assert used <= labels


@pytest.mark.parametrize("name", ["TruedraftNotReady", "TruedraftAuditsOff"])
def test_a_server_that_drains_raises_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of the pods, which have the longest time to end."""
    lines = (rules.ROOT / "deploy" / "kubernetes" / "base" / "settings.env").read_text("utf-8").splitlines()
    settings = settings_of(dict(line.split("=", 1) for line in lines if line[:1] not in ("", "#")), monkeypatch)
    minutes = rules.alerts()[name]["for"]
    assert minutes.endswith("m")
    assert 60 * int(minutes.removesuffix("m")) > seconds_to_end(settings) + 30  # and an interval, before it is seen


def checks() -> Iterator[tuple[str, str, Any]]:
    """(file, query or alert, what is expected) of every check of promtool."""
    for path in rules.TESTS:
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]:
            for check in test.get("promql_expr_test", ()):
                yield path.name, check["expr"], check["exp_samples"]
            for check in test.get("alert_rule_test", ()):
                yield path.name, check["alertname"], check["exp_alerts"]


def test_every_alert_is_seen_to_fire() -> None:
    fired = {query for _, query, expected in checks() if query in ALERTS and expected}
    for _, _, expected in checks():
        for sample in expected:
            fired |= set(re.findall(r'alertname="(\w+)"', sample.get("labels", "")))
    assert fired == set(ALERTS)


def test_every_alert_is_seen_not_to_fire_where_its_metrics_are_there() -> None:
    assert ("truedraft.healthy.rules.test.yml", "ALERTS", []) in list(checks())
    (healthy,) = yaml.safe_load((rules.FOLDER / "truedraft.healthy.rules.test.yml").read_text("utf-8"))["tests"]
    there = {each["series"].partition("{")[0] for each in healthy["input_series"]}
    asked = {selector.name for expression in rules.expressions().values() for selector in selectors(expression)}
    assert asked - set(rules.recorded()) == there


def test_preflight_finds_the_alert_of_a_checkout() -> None:
    line = alerts_line(rules.FOLDER)
    assert line.answer == "yes"
    assert "TruedraftOutputMismatch" in line.reason


@needs_promtool
def test_promtool_takes_the_configuration() -> None:
    run("check", "config", "prometheus.yml")


@needs_promtool
@pytest.mark.parametrize("path", rules.TESTS, ids=lambda path: Path(path).name)
def test_alerts_fire_when_they_should_and_not_otherwise(path: Path) -> None:
    run("test", "rules", path.name)


def test_every_recorded_series_is_in_the_docs() -> None:
    page = (rules.ROOT / "docs" / "monitoring.md").read_text("utf-8")
    shown: set[str] = set()
    for names in re.findall(r"(?m)^\| (`truedraft:.*?`) \|", page):
        first = ""
        for name in re.findall(r"`([^`]+)`", names):
            first = first or name
            shown.add(name if name.startswith("truedraft:") else re.sub(r"\d+[mhd]$", name.removeprefix(".."), first))
    assert shown == set(rules.recorded())
