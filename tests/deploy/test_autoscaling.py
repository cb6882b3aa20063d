"""The ScaledObject asks for metrics that there are, of the pods that it scales."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from server.metrics.schema import label_values
from tests.deploy import image
from tests.deploy.prometheus import needs_promtool
from tests.deploy.rendered import Object, environment_of, needs_kubectl, overlay, server_of, the
from tests.deploy.settings_of import settings_of

pytestmark = needs_kubectl


def triggers() -> dict[str, Object]:
    return {
        trigger["name"]: trigger["metadata"]
        for trigger in the("ScaledObject", overlay("production"))["spec"]["triggers"]
    }


def test_it_scales_the_deployment_and_nobody_else_says_how_many_pods_there_are() -> None:
    objects = overlay("production")
    assert (
        the("ScaledObject", objects)["spec"]["scaleTargetRef"]["name"] == the("Deployment", objects)["metadata"]["name"]
    )
    assert "replicas" not in the("Deployment", objects)["spec"]


def test_its_queries_name_gauges_of_the_server_in_this_namespace() -> None:
    namespace = the("Namespace", overlay("production"))["metadata"]["name"]
    assert set(triggers()) == {"waiting", "running"}
    for trigger in triggers().values():
        match = re.fullmatch(r'sum\((\w+)\{job="truedraft", namespace="(\w+)"\}\)', trigger["query"])
        assert match is not None
        assert match[1] in label_values()
        assert match[2] == namespace


@needs_promtool
def test_its_queries_parse(tmp_path: Path) -> None:
    rules = [{"record": name, "expr": trigger["query"]} for name, trigger in triggers().items()]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}), "utf-8")
    command = ["promtool", "check", "rules", "queries.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_pod_is_added_before_its_seats_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = overlay("production")
    variables = {**image.environment(), **environment_of(server_of(objects), objects)}
    variables.pop("PATH")
    assert float(triggers()["running"]["threshold"]) < settings_of(variables, monkeypatch).max_num_seqs


def test_a_prometheus_that_does_not_answer_takes_no_pods_away() -> None:
    spec = the("ScaledObject", overlay("production"))["spec"]
    assert spec["fallback"]["replicas"] >= spec["minReplicaCount"]
    assert all(trigger["ignoreNullValues"] == "false" for trigger in triggers().values())
