"""A real Prometheus scrapes a real server under load: every board, variable and rule finds something there."""

from __future__ import annotations

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

PROMPTS = [
    "0 1 2 0 1 2 0 1 2",
    "the quick brown fox jumps over the lazy dog. the quick brown fox",
    "Hello, world! Hello,",
]
CLIENTS = 2


def keep_asking(url: str, which: int, enough: threading.Event) -> None:
    """One client: answers that are drafted, whole and streamed, and now and then a prompt that cannot be served."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        number = 0
        while not enough.is_set():
            number += 1
            body = {"model": MODEL_NAME, "max_tokens": 24, "seed": number, "prompt": PROMPTS[which % len(PROMPTS)]}
            http.post("/v1/completions", json={**body, "stream": number % 2 == 0})
            if number % 2 == 0:
                http.post("/v1/completions", json={**body, "prompt": "0 1 2 " * CONTEXT})


@pytest.fixture(scope="module")
def prometheus(tiny_model: Path, model_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Beside the server a target that nobody answers, so that an alert fires."""
    folder = tmp_path_factory.mktemp("prometheus")
    service = build_service(tiny_model, model_home, audit_rate=1.0, num_speculative_tokens=4)
    enough = threading.Event()
    with running(service) as url:
        config = write_config(folder, [url.removeprefix("http://"), f"127.0.0.1:{free_port()}"])
        clients = [threading.Thread(target=keep_asking, args=(url, i, enough), daemon=True) for i in range(CLIENTS)]
        with prometheus_process(config, folder / "log") as found:
            for client in clients:
                client.start()
            try:
                yield found
            finally:
                enough.set()
                for client in clients:
                    client.join(60)


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
