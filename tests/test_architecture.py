"""The rules between the rooms, and what is packaged."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
ROOMS = sorted({name.split(".")[0] for name in PACKAGES})


def test_imports_point_one_way() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    ran = subprocess.run([*lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 broken" in ran.stdout


def test_every_room_is_under_the_import_rules() -> None:
    assert sorted(PROJECT["tool"]["importlinter"]["root_packages"]) == ROOMS


def test_every_room_is_typed_strictly() -> None:
    assert PROJECT["tool"]["mypy"]["strict"] is True
    assert sorted(PROJECT["tool"]["mypy"]["files"]) == sorted([*ROOMS, "deploy/grafana", "deploy/locust"])


def test_every_folder_of_code_is_packaged() -> None:
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == set(PACKAGES)


def test_every_kernel_source_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["model.kernels"]
    kernels = ROOT / "model" / "kernels"
    packaged = {path for pattern in patterns for path in kernels.glob(pattern)}
    sources = {path for path in kernels.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc", ".so"}}
    assert sources
    assert sources <= packaged


def test_every_dependency_has_a_pin_for_ci() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(Requirement(line).name): Requirement(line).specifier for line in lines}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [Requirement(line) for line in (*PROJECT["project"]["dependencies"], *extras["dev"])]
    own = {extra for each in wanted if each.name == PROJECT["project"]["name"] for extra in each.extras}
    wanted += [Requirement(line) for extra in sorted(own) for line in extras[extra]]
    for requirement in wanted:
        if requirement.name == PROJECT["project"]["name"]:
            continue
        pin = pins[canonicalize_name(requirement.name)]
        assert [clause.operator for clause in pin] == ["=="], requirement.name
        assert requirement.specifier.contains(next(iter(pin)).version), requirement.name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_it_is_for(package: str) -> None:
    source = (ROOT / Path(*package.split(".")) / "__init__.py").read_text("utf-8")
    assert source.startswith('"""')
