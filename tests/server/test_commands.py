"""Commands that other rooms offer by entry points: found when installed, cheap, and no danger to ``serve``."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import pytest

from server import commands
from server.cli import main

ROOT = Path(__file__).parents[2]
DECLARED: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"][
    commands.GROUP
]


def test_every_declared_command_is_installed_and_loads() -> None:
    assert {entry.name: entry.value for entry in entry_points(group=commands.GROUP)} == DECLARED
    found = commands.find_commands()
    assert set(found) == set(DECLARED)
    assert all(isinstance(command.HELP, str) and callable(command.run) for command in found.values())
    assert not any(isinstance(command, commands._Broken) for command in found.values())


def test_help_needs_no_torch() -> None:
    code = "import sys; from server.cli import build_parser; from server.commands import find_commands; "
    code += "build_parser(find_commands()).format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("flags", [[], ["--flag", "value"]])
def test_a_command_that_cannot_be_imported_is_one_line_and_hurts_no_other(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = EntryPoints([EntryPoint("verify", "no_such_module_anywhere", commands.GROUP)])
    monkeypatch.setattr(commands, "entry_points", lambda group: entries)
    assert main(["verify", *flags]) == 1
    assert "no_such_module_anywhere" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "serve" in capsys.readouterr().out


def test_without_entry_points_the_servers_own_commands_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: EntryPoints())
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "--model" in capsys.readouterr().out
