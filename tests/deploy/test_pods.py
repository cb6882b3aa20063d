"""What the pods of deploy/kubernetes are given fits what the server needs: time to end, threads, memory, places."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from server.auth.middleware import ALWAYS_OPEN
from server.run import TIMER_SECONDS, WATCH_SECONDS
from server.settings import Settings
from tests.deploy import image
from tests.deploy.rendered import (
    OVERLAYS,
    Object,
    bytes_of,
    environment_of,
    needs_kubectl,
    overlay,
    pod_of,
    server_of,
    the,
)
from tests.deploy.settings_of import seconds_to_end, settings_of

pytestmark = needs_kubectl
each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def settings(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    objects = overlay(name)
    variables = {**image.environment(), **environment_of(server_of(objects), objects)}
    variables.pop("PATH")
    return settings_of(variables, monkeypatch)


def containers(name: str) -> list[Object]:
    pod = pod_of(overlay(name))
    return [*pod["initContainers"], *pod["containers"]]


def longest(probe: Object) -> int:
    """Seconds after which a probe that always fails has failed for good."""
    seconds: int = probe["periodSeconds"] * probe["failureThreshold"]
    return seconds


@each_overlay
def test_the_server_takes_its_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings(name, monkeypatch).device == ("cuda" if name == "gpu" else "cpu")


@each_overlay
def test_the_grace_period_is_longer_than_all_that_an_end_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, seconds = server_of(overlay(name))["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = float(seconds) + seconds_to_end(settings(name, monkeypatch))
    assert pod_of(overlay(name))["terminationGracePeriodSeconds"] > needed


@each_overlay
def test_a_frozen_server_ends_by_itself_before_it_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = settings(name, monkeypatch).stall_timeout + TIMER_SECONDS + 2 * WATCH_SECONDS
    assert longest(server_of(overlay(name))["livenessProbe"]) > patience


@each_overlay
def test_a_start_has_time_and_the_rollout_waits_for_it(name: str) -> None:
    startup = longest(server_of(overlay(name))["startupProbe"])
    assert startup >= 600
    assert the("Deployment", overlay(name))["spec"]["progressDeadlineSeconds"] > startup


@each_overlay
def test_the_probes_need_no_api_key(name: str) -> None:
    server = server_of(overlay(name))
    paths = {probe: server[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/live"}
    assert set(paths.values()) <= ALWAYS_OPEN


@each_overlay
def test_the_server_has_as_many_threads_as_cores(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = server_of(overlay(name))["resources"]
    assert str(settings(name, monkeypatch).num_threads) == resources["limits"]["cpu"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"]


@each_overlay
def test_memory_is_bounded_and_holds_the_kv_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for container in containers(name):
        resources = container["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
    if name != "gpu":  # there the KV cache is in the GPU's memory
        kv_cache = settings(name, monkeypatch).kv_cache_memory
        assert kv_cache is not None
        assert 2 * kv_cache <= bytes_of(server_of(overlay(name))["resources"]["limits"]["memory"])


def test_a_gpu_is_asked_for_where_one_is_used() -> None:
    limits = {name: server_of(overlay(name))["resources"]["limits"] for name in OVERLAYS}
    assert {name for name, limit in limits.items() if "nvidia.com/gpu" in limit} == {"gpu"}
    tolerations = pod_of(overlay("gpu"))["tolerations"]
    assert [toleration["key"] for toleration in tolerations] == ["nvidia.com/gpu"]


@each_overlay
def test_the_pods_keep_to_the_restricted_standard(name: str) -> None:
    # https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
    pod = pod_of(overlay(name))
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all({"emptyDir", "secret"} & set(volume) for volume in pod["volumes"])
    for container in containers(name):
        context: dict[str, Any] = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert all("hostPort" not in port for port in container.get("ports", ()))
    labels = the("Namespace", overlay(name))["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@each_overlay
def test_the_user_is_the_images(name: str) -> None:
    context = pod_of(overlay(name))["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == image.user()
    assert context["fsGroup"] == context["runAsGroup"]  # else it could not write into its volumes, or read its keys


@each_overlay
def test_the_root_is_read_only_and_the_server_can_write_where_it_must(name: str) -> None:
    pod, variables = pod_of(overlay(name)), image.environment()
    writable = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    for container in containers(name):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        places = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in writable}
        assert places == {"/tmp", variables["TRUEDRAFT_HOME"]}
    assert all(volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if "emptyDir" in volume)
    assert PurePosixPath(variables["HF_HOME"]).is_relative_to(variables["TRUEDRAFT_HOME"])


@each_overlay
def test_the_model_that_is_fetched_is_the_one_that_is_served(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = overlay(name)
    (fetch,) = pod_of(objects)["initContainers"]
    assert fetch["args"] == ["fetch", "$(TRUEDRAFT_MODEL)"]
    assert environment_of(fetch, objects)["TRUEDRAFT_MODEL"] == settings(name, monkeypatch).model


@each_overlay
def test_kubernetes_tells_the_server_nothing_that_it_was_not_asked(name: str) -> None:
    pod = pod_of(overlay(name))
    assert pod["enableServiceLinks"] is False  # TRUEDRAFT_PORT=tcp://...
    assert pod["automountServiceAccountToken"] is False


@each_overlay
def test_a_drain_of_nodes_takes_one_pod_at_a_time_and_never_waits_for_ever(name: str) -> None:
    budget = the("PodDisruptionBudget", overlay(name))["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_a_rollout_keeps_all_pods_that_it_can() -> None:
    strategies = {name: the("Deployment", overlay(name))["spec"]["strategy"]["rollingUpdate"] for name in OVERLAYS}
    assert strategies["cpu"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert strategies["gpu"] == {"maxSurge": 0, "maxUnavailable": 1}  # there may be no GPU to spare
