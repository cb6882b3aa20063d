"""The image: what the Dockerfile copies, where it writes, and that its health check tells the truth."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import PurePosixPath

import pytest

from tests.deploy import image
from tests.deploy.settings_of import settings_of

PROJECT = tomllib.loads((image.ROOT / "pyproject.toml").read_text("utf-8"))


def check_health(port: int) -> int:
    """The exit code of the image's health check for a server on this machine's ``port``, behind a proxy for others."""
    interpreter, *rest = image.health_check()
    assert interpreter == "python"
    variables = {**os.environ, "TRUEDRAFT_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    variables.pop("no_proxy", None)
    variables.pop("NO_PROXY", None)
    return subprocess.run(
        [sys.executable, *rest], env=variables, capture_output=True, timeout=60, check=False
    ).returncode


def test_the_health_check_passes_for_a_ready_server(base: str) -> None:
    assert check_health(int(base.rsplit(":", 1)[1])) == 0


def test_the_health_check_fails_where_nobody_answers() -> None:
    from bench.process import free_port

    assert check_health(free_port()) != 0


def test_every_package_is_copied_into_the_image() -> None:
    rooms = {name.split(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]}
    copied = {first for first, second in re.findall(r"^COPY (\w+) (\w+)$", image.DOCKERFILE, re.MULTILINE)}
    allowed = set(re.findall(r"^!([\w.]+)$", (image.ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE))
    assert rooms == copied
    assert rooms <= allowed


def test_everything_that_is_written_at_run_time_lies_in_the_volume() -> None:
    variables = image.environment()
    (volume,) = re.findall(r'^VOLUME \["(.*)"\]$', image.FINAL, re.MULTILINE)
    for name in ("TRUEDRAFT_HOME", "HF_HOME"):
        assert PurePosixPath(variables[name]).is_relative_to(volume)


def test_the_kernels_lie_where_an_installation_ships_them() -> None:
    prefix = re.findall(r"python -m venv (\S+)", image.DOCKERFILE)[0]  # sys.prefix of what runs
    homes = re.findall(r"TRUEDRAFT_HOME=(\S+) truedraft build-kernels", image.DOCKERFILE)
    assert homes == [f"{prefix}/share/truedraft"]  # model/kernels/build.py
    assert image.environment()["PATH"].startswith(f"{prefix}/bin:")


def test_the_image_listens_where_its_port_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of({k: v for k, v in image.environment().items() if k != "PATH"}, monkeypatch)
    assert settings.host == "0.0.0.0"
    assert re.findall(r"^EXPOSE (\d+)$", image.FINAL, re.MULTILINE) == [str(settings.port)]


def test_the_image_runs_as_a_user_without_rights() -> None:
    uid, gid = image.user()
    assert min(uid, gid) >= 10000
    assert f"--gid {gid} truedraft" in image.FINAL
    assert f"--uid {uid} --gid {gid}" in image.FINAL


def requirements(extras: str) -> list[str]:
    """What the image's build would install, by the program in the Dockerfile."""
    program = re.findall(r'python -c "(import sys, tomllib.*)" \\$', image.DOCKERFILE, re.MULTILINE)[0]
    command = [sys.executable, "-c", program, extras]
    return subprocess.run(command, cwd=image.ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split(
        "\n"
    )


def test_the_image_has_all_dependencies_and_what_traces_need() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(\S*)$", image.DOCKERFILE, re.MULTILINE)
    optional = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *optional[extras]]
    assert extras == "otel"
    assert requirements(extras) == [*wanted, ""]
    assert requirements("") == [*PROJECT["project"]["dependencies"], ""]
