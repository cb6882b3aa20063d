"""The command: its lines, its exit code, its file; and how it parts its time. The soak itself is a step of CI."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.process import ServerStartError
from bench.soak import command
from bench.soak.checks import CHECKS, Soaked
from bench.soak.faults import NAMES, fired
from tests.bench.soak.builders import soaked

BROKEN = replace(soaked(), exit_code=1)


@pytest.mark.parametrize(("found", "code"), [(soaked(), 0), (BROKEN, 1)])
def test_there_is_a_line_for_each_invariant_and_one_that_fails_is_the_exit_code(
    found: Soaked, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_soak", lambda options, folder: found)
    assert command.main(["--minutes", "1", "--json", str(tmp_path / "report.json")]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert [line.startswith("FAILED") for line in lines].count(True) == code
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] == (code == 0)
    assert len(report["checks"]) == len(CHECKS)
    assert [entry["memory_bytes"] for entry in report["rounds"]] == [end.memory_bytes for end in found.record.rounds]


def test_a_server_that_does_not_start_is_another_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object, folder: Path) -> Soaked:
        raise ServerStartError("it did not get ready:\nits last line")

    monkeypatch.setattr(command, "_soak", fail)
    assert command.main([]) == 2
    assert "its last line" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [10.0, 90.0, 600.0])
def test_rounds_take_all_the_time_and_some_follow_the_warm_up(seconds: float) -> None:
    warm, others = command.rounds_of(seconds)
    assert sum(warm) + sum(others) == pytest.approx(seconds)
    assert warm
    assert len(others) >= 2


def test_faults_that_happened_are_told_with_what_they_may_cost() -> None:
    armed = [
        {"fault": {"point": "verify", "action": "raise", "match": None}, "fired": 1},
        {"fault": {"point": "verify", "action": "hang", "match": None}, "fired": 1},
        {"fault": {"point": "compile", "action": "exit", "match": None}, "fired": 1},
        {"fault": {"point": "sample", "action": "raise", "match": None}, "fired": 0},
        {"fault": {"point": "sample", "action": "raise", "match": 7}, "fired": 3},
    ]
    found = fired(armed)
    told = [(one.name, one.cost) for one in found]
    assert told == [("verify raise", 0), ("verify hang", 0), ("compile exit", 1), ("sample victim", 0)]
    assert {one.name for one in found} <= set(NAMES)
