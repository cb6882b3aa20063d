"""A real Prometheus scrapes a real server under locust: every board, variable and rule finds something there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.process import free_port
from tests.deploy import boards, rules
from tests.deploy.prometheus import Prometheus, needs_prometheus, prometheus_process, write_config
from tests.deploy.promql import selectors
from tests.server.builders import CONTEXT, MODEL_NAME, build_service, running

pytestmark = needs_prometheus

LOCUST = (
    "-m", "locust", "-f", str(boards.ROOT / "deploy" / "locust" / "locustfile.py"), "--headless", "--only-summary",
    "-u", "2", "-r", "2", "-t", "10m", "--classes", "chat,copy", "--sharing", "all", "--output-tokens", "16-32",
)  # fmt: skip


@contextlib.contextmanager
def load(url: str, folder: Path) -> Iterator[None]:
    """Locust, and beside it somebody whose prompts are too long, until the block ends."""
    enough = threading.Event()

    def ask_too_much() -> None:
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            while not enough.wait(0.5):
                http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "0 1 2 " * CONTEXT})

    client = threading.Thread(target=ask_too_much, daemon=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LOCUST_", "LOAD_"))}
    with (folder / "locust.log").open("wb") as out:
        command = [sys.executable, *LOCUST, "--host", url]
        locust = subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=subprocess.STDOUT)
        client.start()
        try:
            yield
            assert locust.poll() is None, (folder / "locust.log").read_text("utf-8")
        finally:
            enough.set()
            client.join(60)
            locust.terminate()
            locust.wait(60)


@pytest.fixture(scope="module")
def prometheus(tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Beside the server a target that nobody answers, so that an alert fires."""
    folder = tmp_path_factory.mktemp("prometheus")
    service = build_service(tiny_model, model_home, audit_rate=1.0, num_speculative_tokens=4)
    with running(service) as url, load(url, folder):
        config = write_config(folder, [url.removeprefix("http://"), f"127.0.0.1:{free_port()}"])
        with prometheus_process(config, folder / "log") as found:
            yield found


@pytest.mark.parametrize("name", boards.NAMES)
def test_every_query_of_a_board_finds_something(name: str, prometheus: Prometheus) -> None:
    ranged = {target["expr"] for panel in boards.panels(name) for target in panel["targets"] if target["range"]}
    asked = {query.asked: query.written in ranged for query in boards.queries() if query.board == name}
    assert prometheus.missing(asked) == []


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    queries = list(boards.variable_queries())
    assert prometheus.missing({query.asked: False for query in queries}) == []
    for query in queries:
        assert prometheus.get(f"label/{query.legend}/values", **{"match[]": query.asked})


def test_every_rule_runs(prometheus: Prometheus) -> None:
    assert prometheus.missing(dict.fromkeys(rules.recorded(), False)) == []
    loaded = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in loaded} == set(rules.expressions())
    assert {(rule["health"], rule.get("lastError", "")) for rule in loaded} == {("ok", "")}


def test_every_series_that_an_alert_asks_for_is_there(prometheus: Prometheus) -> None:
    """Whether an alert fires when it should is in the tests of promtool."""
    asked = {selector for name in rules.alerts() for selector in selectors(rules.expressions()[name])}
    assert len(asked) > len(rules.alerts())
    assert prometheus.missing({str(selector): False for selector in asked}) == []


def test_the_server_that_is_gone_is_told_of(prometheus: Prometheus) -> None:
    assert prometheus.eventually('ALERTS{alertname="TruedraftDown", alertstate="firing"}')
    (down,) = (alert for alert in prometheus.get("alerts")["alerts"] if alert["labels"]["alertname"] == "TruedraftDown")
    assert down["annotations"]["summary"] == f"{down['labels']['instance']}: does not answer"


def test_nobody_is_woken_for_a_server_that_does_well(prometheus: Prometheus) -> None:
    """But for the target that is gone, and for how fast this machine is."""
    assert prometheus.eventually("truedraft:ttft_bad:ratio_rate5m")
    alerts = rules.alerts()
    waking = {name for name in alerts if alerts[name]["labels"]["severity"] == "critical" and "Burn" not in name}
    firing = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
    assert firing & waking == {"TruedraftDown"}
