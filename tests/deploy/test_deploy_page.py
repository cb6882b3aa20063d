"""docs/deploy.md holds to the files that it describes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from server.metrics import PREFIX, SCHEMA
from tests.deploy.rendered import KUBERNETES, ROOT, kustomize, needs_kubectl, overlay, pod_of, server_of, the
from tests.deploy.settings_of import seconds_to_end, settings_of
from tests.deploy.test_autoscaling import triggers
from tests.deploy.test_compose import MAIN, SERVICES, load, with_defaults
from tests.deploy.test_kubernetes import VERSIONS
from tests.deploy.test_pods import containers, longest, settings

PAGE = (ROOT / "docs" / "deploy.md").read_text("utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.strip().splitlines()]


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading."""
    text = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_every_path_that_it_names_exists() -> None:
    named = re.findall(r"deploy/[\w./-]+", PAGE)
    assert named
    for name in named:
        if name != "deploy/compose/api-keys.txt":  # the reader's own
            assert (ROOT / name).exists(), name


def test_its_commands_are_of_tools_that_read_these_files() -> None:
    for command in COMMANDS:
        assert command.split()[0] in ("docker", "kubectl", "deploy/kubernetes/prometheus-rules.sh"), command
        for file in re.findall(r" -f (deploy/\S+)", command):
            assert load(Path(file).name)
        for folder in re.findall(r" -k (\S+)", command):
            assert (ROOT / folder / "kustomization.yaml").exists()


def test_every_overlay_and_component_and_laid_over_file_is_described() -> None:
    for folder in [*(KUBERNETES / "overlays").iterdir(), *(KUBERNETES / "components").iterdir()]:
        assert f"`{folder.relative_to(ROOT)}`" in PAGE
    for file in (ROOT / "deploy" / "compose").glob("compose.*.yaml"):
        assert f"`{file.relative_to(ROOT)}`" in PAGE


def test_the_services_answer_where_it_says() -> None:
    table = {row[0].strip("`"): row[1] for row in rows("Compose") if row[0].strip("`") in SERVICES}
    published = {
        name: f"http://{with_defaults(service['ports'][0]).rsplit(':', 1)[0]}" for name, service in SERVICES.items()
    }
    assert table == published


def test_the_variables_of_compose_are_those_that_it_lists() -> None:
    text = (ROOT / "deploy" / "compose" / MAIN).read_text("utf-8")
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    listed: dict[str, str] = {}
    for row in rows("Compose"):
        names = re.findall(r"`([A-Z_]+)`", row[0])
        listed |= dict(zip(names, row[1].split(", "), strict=False))
    assert listed == used


@needs_kubectl
def test_the_times_are_those_of_the_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    server, pod, of_server = server_of(overlay("cpu")), pod_of(overlay("cpu")), settings("cpu", monkeypatch)
    shown = [int(row[1]) for row in rows("How a pod starts, stops and dies")[2:]]
    assert shown == [
        longest(server["startupProbe"]),
        longest(server["readinessProbe"]),
        longest(server["livenessProbe"]),
        int(server["lifecycle"]["preStop"]["exec"]["command"][1]),
        of_server.shutdown_timeout,
        seconds_to_end(of_server) - of_server.shutdown_timeout,
        pod["terminationGracePeriodSeconds"],
    ]
    assert f"`--stall-timeout`, {of_server.stall_timeout:g} here" in PAGE


@needs_kubectl
def test_the_sizes_are_those_of_the_manifests() -> None:
    (size,) = {tuple(container["resources"]["limits"].items()) for container in containers("cpu")}
    assert size == (("cpu", "4"), ("memory", "4Gi"))
    assert "two pods of 4 cores and 4 GiB" in PAGE
    assert the("Deployment", overlay("cpu"))["spec"]["replicas"] == 2
    spec = the("ScaledObject", overlay("production"))["spec"]
    assert f"({spec['minReplicaCount']} to {spec['maxReplicaCount']})" in PAGE
    assert f"{spec['fallback']['replicas']} pods it is" in PAGE
    assert f"{triggers()['waiting']['threshold']} waiting requests each" in PAGE
    assert f"{triggers()['running']['threshold']} running ones" in PAGE


@needs_kubectl
def test_the_overlay_that_it_shows_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "Kustomization" in block]
    above = os.path.relpath(KUBERNETES, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(
        example.replace("../../components", f"{above}/components").replace("[../cpu]", f"[{above}/overlays/cpu]"),
        "utf-8",
    )
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    mount = {"name": "truedraft", "volumeMounts": [{"name": "model", "mountPath": "/models", "readOnly": True}]}
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "truedraft"},
        "spec": {"template": {"spec": {"containers": [mount], "volumes": [volume]}}},
    }
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(patch), "utf-8")
    built = kustomize(tmp_path)
    data = the("ConfigMap", built)["data"]
    assert data["TRUEDRAFT_MODEL"] == "/models/mine"
    assert settings_of(data, monkeypatch).max_num_seqs == 64
    assert "/models" in [mount["mountPath"] for mount in server_of(built)["volumeMounts"]]


def test_the_endpoint_picker_is_told_metrics_that_there_are() -> None:
    (example,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "core-metrics" in block]
    (engine,) = yaml.safe_load(example)["parameters"]["engineConfigs"]
    table = [(row[1].strip("`"), row[2].strip("`")) for row in rows("Behind a gateway")[2:]]
    assert {value for key, value in engine.items() if key.endswith("Spec") and value} <= {ours for ours, _ in table}
    for ours, theirs in table:
        name = ours.removeprefix(PREFIX)
        assert SCHEMA[name].vllm
        assert theirs == f"vllm:{name}"


def test_the_versions_are_those_of_the_schemas_that_are_checked() -> None:
    assert f"Kubernetes {VERSIONS[0]} and {VERSIONS[1]}" in PAGE
    assert f"Kubernetes {VERSIONS[0]} or newer" in PAGE
