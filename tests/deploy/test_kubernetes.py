"""deploy/kubernetes builds, in every combination that it offers, into objects that Kubernetes and the operators take.

Built by kubectl's own kustomize and held against the API's own schemas; no cluster is asked.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.rendered import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Object,
    needs_kubectl,
    overlay,
    server_of,
    the,
    with_components,
)

VERSIONS = ("1.31", "1.37")  # oldest and newest that the manifests are written for
SCHEMAS = {path.stem: json.loads(path.read_text("utf-8")) for path in (ROOT / "tests/deploy/schemas").glob("*.json")}
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def check(one: Object, version: str) -> None:
    """Against the schema of its kind; unknown fields are errors. Raises what the validators raise."""
    if one["kind"] in SCHEMAS:
        jsonschema.validate(one, SCHEMAS[one["kind"]])
    else:
        kubernetes_validate.validate(one, version, strict=True)


@needs_kubectl
@each_overlay
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(name: str, version: str) -> None:
    for one in overlay(name):
        check(one, version)


@needs_kubectl
@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_each_component_goes_with_each_overlay(name: str, component: str, tmp_path: Path) -> None:
    objects = with_components(tmp_path, name, [component])
    assert objects != overlay(name)
    for one in objects:
        check(one, VERSIONS[-1])


@needs_kubectl
def test_a_field_that_kubernetes_does_not_know_is_found() -> None:
    deployment = json.loads(json.dumps(the("Deployment", overlay("cpu"))))
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(deployment, VERSIONS[0])


@needs_kubectl
@pytest.mark.parametrize("kind", sorted({"ServiceMonitor", "ScaledObject"}))
def test_a_field_that_an_operator_does_not_know_is_found(kind: str) -> None:
    one = json.loads(json.dumps(the(kind, overlay("production"))))
    one["spec"]["trigers"] = []
    with pytest.raises(jsonschema.ValidationError):
        check(one, VERSIONS[0])


@needs_kubectl
def test_the_example_of_everything_has_all_components() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "overlays/production/kustomization.yaml").read_text("utf-8"))
    assert sorted(Path(path).name for path in kustomization["components"]) == COMPONENTS


@needs_kubectl
@each_overlay
def test_all_objects_are_in_the_namespace_that_is_made(name: str) -> None:
    objects = overlay(name)
    namespace = the("Namespace", objects)["metadata"]["name"]
    assert {one["metadata"]["namespace"] for one in objects if one["kind"] != "Namespace"} == {namespace}


@needs_kubectl
@each_overlay
def test_every_selector_finds_the_pods(name: str) -> None:
    objects = overlay(name)
    labels = the("Deployment", objects)["spec"]["template"]["metadata"]["labels"].items()
    spread = the("Deployment", objects)["spec"]["template"]["spec"]["topologySpreadConstraints"]
    selectors = [
        the("Service", objects)["spec"]["selector"],
        the("Deployment", objects)["spec"]["selector"]["matchLabels"],
        the("PodDisruptionBudget", objects)["spec"]["selector"]["matchLabels"],
        *(constraint["labelSelector"]["matchLabels"] for constraint in spread),
        *(one["spec"]["podSelector"]["matchLabels"] for one in objects if one["kind"] == "NetworkPolicy"),
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels


@needs_kubectl
@each_overlay
def test_every_port_that_is_named_is_the_servers(name: str) -> None:
    objects = overlay(name)
    (port,) = server_of(objects)["ports"]
    (service,) = the("Service", objects)["spec"]["ports"]
    assert service["targetPort"] == port["name"]
    for one in objects:
        if one["kind"] == "ServiceMonitor":
            assert [endpoint["port"] for endpoint in one["spec"]["endpoints"]] == [service["name"]]
        if one["kind"] == "NetworkPolicy":
            asked = [port for rule in one["spec"]["ingress"] for port in rule["ports"]]
            assert {entry["port"] for entry in asked} == {port["name"]}


@needs_kubectl
@each_overlay
def test_the_image_is_one_of_this_version(name: str) -> None:
    version = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)[0]
    pod = the("Deployment", overlay(name))["spec"]["template"]["spec"]
    images = {container["image"] for container in [*pod["initContainers"], *pod["containers"]]}
    (image,) = images
    assert image == f"registry.example.com/truedraft:{version}" + ("-cuda" if name == "gpu" else "")


@needs_kubectl
def test_a_changed_setting_is_a_changed_pod(tmp_path: Path) -> None:
    before = the("Deployment", overlay("cpu"))["spec"]["template"]
    (tmp_path / "more.env").write_text("TRUEDRAFT_MAX_NUM_SEQS=16\n", "utf-8")
    changed = with_components(tmp_path, "cpu", [])  # as a template of what follows
    assert the("Deployment", changed)["spec"]["template"] == before
    kustomization = yaml.safe_load((tmp_path / "kustomization.yaml").read_text("utf-8"))
    kustomization["configMapGenerator"] = [{"name": "truedraft-settings", "behavior": "merge", "envs": ["more.env"]}]
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "more.env").rename(other / "more.env")
    kustomization["resources"] = [f"../{kustomization['resources'][0]}"]
    (other / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), "utf-8")
    done = subprocess.run(["kubectl", "kustomize", str(other)], capture_output=True, text=True, timeout=60, check=True)
    changed = list(yaml.safe_load_all(done.stdout))
    assert the("ConfigMap", changed)["data"]["TRUEDRAFT_MAX_NUM_SEQS"] == "16"
    assert the("Deployment", changed)["spec"]["template"] != before


@needs_kubectl
def test_who_may_reach_the_server_is_said() -> None:
    policy = the("NetworkPolicy", overlay("production"))["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    for rule in policy["ingress"]:
        assert all(source["namespaceSelector"]["matchLabels"] for source in rule["from"])
    for rule in policy["egress"]:
        assert rule["ports"]
        blocks = [target["ipBlock"] for target in rule["to"] if "ipBlock" in target]
        assert all("169.254.0.0/16" in block["except"] for block in blocks if ":" not in block["cidr"])


@needs_kubectl
def test_the_pods_are_scraped_one_by_one() -> None:
    monitor = the("ServiceMonitor", overlay("production"))
    labels = the("Service", overlay("production"))["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["spec"]["jobLabel"]] == "truedraft"
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {"targetLabel": "instance", "sourceLabels": ["__meta_kubernetes_pod_name"]} in endpoint["relabelings"]


@needs_kubectl
def test_with_api_keys_there_is_no_way_around_them() -> None:
    objects = overlay("production")
    pod = the("Deployment", objects)["spec"]["template"]["spec"]
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert "optional" not in secret
    (endpoint,) = the("ServiceMonitor", objects)["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"]["name"] == secret["secretName"]
    variables = {variable["name"]: variable.get("value") for variable in server_of(objects)["env"]}
    mount = next(mount for mount in server_of(objects)["volumeMounts"] if mount["name"] == "api-keys")
    assert variables["TRUEDRAFT_API_KEYS_FILE"] == f"{mount['mountPath']}/{secret['items'][0]['path']}"


def rules_as_objects() -> list[Any]:
    script = KUBERNETES / "prometheus-rules.sh"
    done = subprocess.run([script, "elsewhere"], capture_output=True, text=True, timeout=60, check=True)
    return list(yaml.safe_load_all(done.stdout))


def test_the_rules_of_prometheus_become_objects_of_its_operator() -> None:
    files = sorted((ROOT / "deploy" / "prometheus").glob("*.rules.yml"))
    objects = rules_as_objects()
    assert [one["spec"] for one in objects] == [yaml.safe_load(file.read_text("utf-8")) for file in files]
    for one in objects:
        assert one["metadata"]["namespace"] == "elsewhere"
        check(one, VERSIONS[0])
