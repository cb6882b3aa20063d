"""The README's commands do what it says. Whatever it shows is run here or by .ci/run."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.process import server_process
from bench.quick import COLUMNS
from server.setting_flags import flag_name
from server.settings import Settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CI = (ROOT / ".ci" / "run").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(tool: str) -> list[str]:
    """Shell blocks that begin with ``tool``; each block is one command, or one a line."""
    return [block for block in blocks("sh") if block.startswith(tool)]


@pytest.fixture(scope="module")
def server(default_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server as ``make serve`` starts it, on a free port."""
    with server_process(["--kv-cache-memory", "1GiB"], tmp_path_factory.mktemp("server") / "log") as url:
        yield url


def shape(value: Any) -> Any:
    """Keys and kinds: what stays the same from one answer to the next."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


@pytest.mark.real_model
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_curl_example_answers_what_the_readme_shows(server: str) -> None:
    (command,) = [block for block in commands("curl") if "/v1/completions" in block]
    ran = subprocess.run(["bash", "-c", command.replace(ADDRESS, server)], capture_output=True, text=True, check=True)
    answer, (shown,) = json.loads(ran.stdout), map(json.loads, blocks("json"))
    assert shape(answer) == shape(shown)
    assert answer["choices"] == shown["choices"]
    assert answer["usage"] == shown["usage"]


@pytest.mark.real_model
def test_the_python_example_prints_what_the_readme_shows(server: str) -> None:
    (program,), (shown, _) = blocks("python"), blocks("text")
    command = [sys.executable, "-c", program.replace(ADDRESS, server)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == shown


@pytest.mark.real_model
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_other_curl_commands_answer(server: str) -> None:
    others = [block for block in commands("curl") if "/v1/completions" not in block]
    assert others
    for command in others:
        script = command.replace(ADDRESS, server).replace("curl -s", "curl -sf")
        assert subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout


def test_the_table_of_speeds_is_one_that_bench_quick_prints() -> None:
    _, table = blocks("text")
    header, *rows = table.splitlines()
    assert re.split(r" {2,}", header) == list(COLUMNS)
    assert [row.split()[0] for row in rows if row.startswith(" ")] == ["mixed"] * 6 + ["copy"] * 6


def test_every_command_is_run_by_a_test_or_by_ci() -> None:
    for block in blocks("sh"):
        if block.startswith("curl"):  # above
            continue
        for line in block.strip().splitlines():
            words = line.split()
            if words[0] == "make":
                assert f"make {words[1]}" in CI, line
            elif words[:2] == [".venv/bin/python", "-m"]:
                assert importlib.util.find_spec(words[2]), line
            elif words[0] == ".venv/bin/truedraft":
                assert f"truedraft {words[1]}" in CI, line
            else:  # there is no container engine in CI; the Dockerfile is linted
                assert words[0] == "docker", line
                assert "hadolint Dockerfile" in CI


def test_every_flag_in_the_readme_is_a_setting() -> None:
    flags = {flag_name(name) for name in Settings.model_fields}
    shown = "\n".join([*re.findall(r'ARGS="([^"]*)"', README), *re.findall(r"`(--[\w-]+)", README)])
    flags |= {"--suite"}  # of verify, whose other flags are those of serve
    assert set(re.findall(r"--[\w-]+", shown)) <= flags
