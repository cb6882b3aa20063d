"""What kustomize makes of deploy/kubernetes, and how to find one's way in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())

Object = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="there is no kubectl, whose kustomize builds the overlays"
)


@cache
def kustomize(folder: Path) -> list[Object]:
    """The objects that ``kubectl apply -k folder`` would send."""
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # of something that kustomize will not do for much longer
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def overlay(name: str) -> list[Object]:
    return kustomize(KUBERNETES / "overlays" / name)


def with_components(folder: Path, name: str, components: list[str]) -> list[Object]:
    """An overlay of ``folder`` on the overlay ``name``, with ``components``."""
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(KUBERNETES / "overlays" / name, folder)],
        "components": [os.path.relpath(KUBERNETES / "components" / component, folder) for component in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), "utf-8")
    return kustomize(folder)


def the(kind: str, objects: list[Object]) -> Object:
    """The only object of its kind."""
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def pod_of(objects: list[Object]) -> Object:
    """The spec of the Deployment's pods."""
    spec: Object = the("Deployment", objects)["spec"]["template"]["spec"]
    return spec


def server_of(objects: list[Object]) -> Object:
    """The container that serves."""
    (container,) = pod_of(objects)["containers"]
    return container


def environment_of(container: Object, objects: list[Object]) -> dict[str, str]:
    """Its variables, those of the image apart."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        found |= next(one["data"] for one in objects if one["kind"] == "ConfigMap" and one["metadata"]["name"] == name)
    for variable in container.get("env", ()):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        else:
            reference = variable["valueFrom"]["resourceFieldRef"]
            assert reference["containerName"] == container["name"]
            value: Any = container["resources"]
            for part in reference["resource"].split("."):
                value = value[part]
            found[variable["name"]] = str(value)
    return found


def bytes_of(quantity: str) -> int:
    """Of a Kubernetes quantity with a binary unit."""
    powers = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4}
    return int(quantity[:-2]) * 1024 ** powers[quantity[-2:]]
