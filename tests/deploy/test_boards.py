"""The boards are what their makers make, ask for what there is, and can be read at a glance."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.grafana.boards import limits
from server.metrics.labels import FINISH_REASONS
from server.metrics.schema import label_values
from tests.deploy import boards, rules
from tests.deploy.promql import selectors, unguarded

ROOT = boards.ROOT
PROVISIONING = ROOT / "deploy" / "grafana" / "provisioning"
QUERIES = {name: [query for query in boards.queries() if query.board == name] for name in boards.NAMES}
every_board = pytest.mark.parametrize("name", boards.NAMES)
PANELS = [panel for name in boards.NAMES for panel in boards.panels(name)]
# Of every scraped series, and of alerts.
TARGET = {"job", "instance"}
OF_ALERTS = TARGET | {"alertname", "alertstate", "severity", "model_name"}


def labels_of(metric: str) -> dict[str, tuple[str, ...]]:
    """The labels of a series that Prometheus has, each with its words where they are fixed."""
    known = label_values()
    if metric == "up":
        return dict.fromkeys(TARGET, ())
    if metric == "ALERTS":
        return dict.fromkeys(OF_ALERTS, ()) | {"alertstate": ("pending", "firing"), "severity": rules.SEVERITIES}
    if metric in rules.recorded():
        return dict.fromkeys(rules.labels_of_recorded(metric), ())
    return known[metric] | dict.fromkeys(TARGET, ())


def test_the_boards_are_what_the_generator_writes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.grafana.boards", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    written = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert set(written) == {f"{name}.json" for name in boards.NAMES}
    assert written == {path.name: path.read_text("utf-8") for path in boards.FOLDER.iterdir()}


@every_board
def test_queries_ask_only_for_metrics_labels_and_words_that_exist(name: str) -> None:
    for query in QUERIES[name]:
        asked = selectors(query.asked)
        assert asked
        for selector in asked:
            known = labels_of(selector.name)
            for label, op, value in selector.labels:
                assert label in known, f"{query}: {selector.name} has no label {label}"
                if known[label] and op in ("=", "=~") and value != ".+":
                    assert set(value.split("|")) <= set(known[label]), query


@every_board
def test_queries_take_the_variables_of_their_board(name: str) -> None:
    for query in QUERIES[name]:
        for selector in selectors(query.written.replace("$__rate_interval", "20s").replace("$__range", "1m")):
            wanted = {"job", "instance", "model_name"} & set(labels_of(selector.name))
            if selector.name == "ALERTS":
                wanted.discard("model_name")  # not all alerts are about a model
            chosen = {label for label, op, value in selector.labels if op == "=~" and value.rstrip("|") == f"${label}"}
            assert wanted <= chosen, f"{query}: {selector}"


@every_board
def test_no_query_divides_by_what_can_be_0(name: str) -> None:
    assert [(str(query), found) for query in QUERIES[name] if (found := unguarded(query.asked))] == []


@every_board
def test_windows_follow_the_screen_or_the_time_range(name: str) -> None:
    for query in QUERIES[name]:
        assert set(re.findall(r"\[(.*?)\]", query.written)) <= {"$__rate_interval", "$__range"}, query


@every_board
def test_a_legend_names_labels_that_the_answer_has(name: str) -> None:
    for query in QUERIES[name]:
        named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        kept = {label for by in re.findall(r"by \(([\w, ]*)\)", query.written) for label in by.split(", ")}
        recorded = {label for selector in selectors(query.asked) for label in labels_of(selector.name)}
        assert named <= (kept or recorded), query


@every_board
def test_a_panel_says_what_it_shows_in_which_unit(name: str) -> None:
    for panel in boards.panels(name):
        assert len(panel["title"]) <= 40
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit
        if any("seconds_bucket" in target["expr"] for target in panel["targets"]):
            assert unit == "s", panel["title"]


@every_board
def test_thresholds_begin_below_everything_and_climb(name: str) -> None:
    for panel in boards.panels(name):
        first, *rest = (step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"])
        assert first is None
        assert rest == sorted(set(rest)), panel["title"]


@every_board
def test_a_number_is_of_now_and_a_ratio_of_nothing_is_a_word(name: str) -> None:
    for panel in boards.panels(name):
        if panel["type"] == "stat":
            (target,) = panel["targets"]
            assert target["instant"]
            assert not target["range"]
            assert " / " not in target["expr"] or panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


@every_board
def test_panels_lie_beside_each_other_without_gaps_at_the_edge(name: str) -> None:
    panels = boards.board(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells, panel["title"]
        cells |= covered
    assert {x for x, _ in cells} == set(range(24))
    widths = {y: sum(1 for _, other in cells if other == y) for _, y in cells}
    assert set(widths.values()) == {24}, "a line of panels is not full"


def test_titles_are_told_apart() -> None:
    for name in boards.NAMES:
        titles = [(panel["title"], panel["type"]) for panel in boards.panels(name)]
        assert len(set(titles)) == len(titles)
    assert len({boards.board(name)["uid"] for name in boards.NAMES}) == len(boards.NAMES)


def test_boards_share_their_variables() -> None:
    first, *others = (boards.board(name)["templating"]["list"] for name in boards.NAMES)
    assert all(other == first for other in others)
    assert [variable["name"] for variable in first] == ["datasource", "job", "model_name", "instance"]


def test_whoever_chooses_everything_gets_what_the_rules_know_also_of_servers_that_are_long_gone() -> None:
    """Values that are looked up are those of the time range: without any server there would be none."""
    job, model_name, instance = boards.board("service")["templating"]["list"][1:]
    assert f'up{{job=~"{job["allValue"]}"}}' in rules.alerts()["TruedraftDown"]["expr"]
    assert model_name["allValue"] == instance["allValue"] == ".+"
    assert {each["name"]: each["allValue"] for each in (job, model_name, instance)} == {
        name: boards.VARIABLES[f"${name}"] for name in ("job", "model_name", "instance")
    }


def test_a_link_to_another_board_keeps_what_was_chosen() -> None:
    for name in boards.NAMES:
        (link,) = boards.board(name)["links"]
        assert link["includeVars"]
        assert link["keepTime"]
        assert set(link["tags"]) <= set(boards.board(name)["tags"])


def test_where_a_board_turns_red_is_where_an_alert_begins() -> None:
    text = {name: " ".join(alert["expr"].split()) for name, alert in rules.alerts().items()}
    for name, end in (
        ("TruedraftEngineStalled", f"> {limits.STALLED_SECONDS}"),
        ("TruedraftQueueOld", f"> {limits.OLDEST_WAITING_SECONDS}"),
        ("TruedraftErrors", f"> {limits.ERRORS}"),
        ("TruedraftShedding", f"> {limits.SHED}"),
        ("TruedraftSpeculationSlower", f"< {limits.SPEEDUP}"),
    ):
        assert text[name].endswith(end), name
    assert f"> {limits.KV_USED} " in text["TruedraftKvPressure"]
    assert f"> {limits.DROPPED} *" in text["TruedraftAuditsDropped"]
    assert f"> {limits.FAST_BURN} * {limits.TTFT_BUDGET} " in text["TruedraftTtftFastBurn"]
    assert f"> {limits.FAST_BURN} * {limits.ITL_BUDGET} " in text["TruedraftItlFastBurn"]
    for which, bound in (("ttft", limits.TTFT_SECONDS), ("itl", limits.ITL_SECONDS)):
        found = [rule for name, rule in rules.recorded().items() if name.startswith(f"truedraft:{which}_bad:")]
        assert len(found) == 7
        assert all(f'le="{bound}"' in rule for rule in found)


def test_what_counts_as_want_of_room_is_the_same_in_board_and_alert() -> None:
    def reasons(query: str) -> set[str]:
        return {
            value
            for selector in selectors(query)
            for name, op, value in selector.labels
            if (name, op) == ("reason", "=~")
        }

    (query,) = (query for query in QUERIES["service"] if query.panel == "Turned away")
    assert reasons(query.asked) == reasons(rules.alerts()["TruedraftShedding"]["expr"])


def test_every_way_to_end_is_on_the_first_board() -> None:
    (panel,) = (panel for panel in boards.panels("service") if panel["title"] == "Choices that ended")
    assert all(reason in panel["description"] for reason in FINISH_REASONS)


def test_a_number_of_words_has_a_word_for_each_value() -> None:
    for panel in PANELS:
        expressions = " ".join(target["expr"] for target in panel["targets"])
        mappings = panel["fieldConfig"]["defaults"]["mappings"]
        for metric, values in (("exactness_level", "0123"), ("equivalence_audits_enabled", "01")):
            if metric in expressions:
                (mapping,) = mappings
                assert set(mapping["options"]) == set(values)


def test_grafana_scrapes_as_often_as_prometheus() -> None:
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text("utf-8"))["datasources"]
    config = yaml.safe_load((rules.FOLDER / "prometheus.yml").read_text("utf-8"))
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_grafana_finds_every_board() -> None:
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "truedraft.yml").read_text("utf-8"))["providers"]
    assert provider["type"] == "file"
    assert not provider["allowUiUpdates"]
    assert math.isfinite(provider["updateIntervalSeconds"])
