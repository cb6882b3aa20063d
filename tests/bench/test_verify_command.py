"""``truedraft verify`` as a person runs it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from model.errors import ModelError
from server.cli import main
from tests.server.builders import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path_factory.getbasetemp() / "verify-home"))


def flags(folder: Path, *more: object) -> list[str]:
    plain = ["--kernels", "torch", "--executor", "generic", "--num-threads", "1"]
    return ["verify", "--model", str(folder), *plain, *map(str, more)]


def test_a_run_that_holds_ends_with_0_and_writes_both_reports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(folder, "--max-positions", 60, "--no-reference", "--report", tmp_path)
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("passed: ")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert f"{report['coverage']['positions']:,} of" in shown.out
    assert f"{report['coverage']['pairs_covered']:,} of {report['coverage']['pairs_total']:,}" in shown.out
    assert (tmp_path / "report.html").stat().st_size > 1000
    # The line that runs one case again, as a shell would take it.
    command = shlex.split(report["cases"][-1]["replay"])
    assert command[:2] == ["truedraft", "verify"]
    assert main([*command[1:], "--report", str(tmp_path / "again")]) == 0
    again = json.loads((tmp_path / "again" / "report.json").read_text())
    assert [case["factors"] for case in again["cases"]] == [report["cases"][-1]["factors"]]


def test_int8_weights_hold_with_drafts_of_their_own_model_accepted_always(folder: Path, tmp_path: Path) -> None:
    case = (
        "batch=2,sampling=greedy,prompts=random,length=16,condition=none,cache=cold,drafter=model,k=3,block_size=4,"
        "chunk=128,threads=1,arrival=together,aborts=no"
    )
    fused = [*flags(folder, "--quantize", "int8", "--case", case, "--report", tmp_path), "--executor", "fused"]
    assert main(fused) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["model"]["quantization"] == "int8"
    assert report["model"]["executor"] == "fused/torch-int8"
    (found,) = report["cases"]
    assert found["drafted"] == found["accepted"] > 0
    assert "--quantize int8" in found["replay"]


def test_a_draft_model_is_loaded_and_part_of_the_command_that_repeats_a_case(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller = save_tiny_model(tmp_path / "smaller", seed=1)
    case = (
        "batch=2,sampling=hot,prompts=random,length=16,condition=none,cache=cold,drafter=model,k=3,block_size=4,"
        "chunk=128,threads=1,arrival=together,aborts=no"
    )
    arguments = flags(folder, "--draft-model", smaller, "--draft", "model", "--case", case, "--report", tmp_path)
    assert main(arguments) == 0
    assert "draft model: smaller\n" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    (found,) = report["cases"]
    assert 0 < found["drafted_by"]["model"] == found["drafted"] > found["accepted"]  # it is another model
    command = shlex.split(found["replay"])
    assert command[command.index("--draft-model") + 1] == str(smaller)
    assert command[command.index("--case") + 1] == case


def test_a_run_without_speculation_does_not_pass(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(folder, "--max-positions", 1, "--no-reference", "--seed", 3, "--report", tmp_path)
    assert main(arguments) == 1
    assert capsys.readouterr().out.startswith("FAILED (nothing was compared with speculation): ")
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["passed"]
    # The command as it was given.
    given = shlex.split(report["command"])
    assert {"--max-positions", "--no-reference", "--seed", "--report"} <= set(given)
    assert "--max-positions" not in report["cases"][0]["replay"]


@pytest.mark.parametrize("given", [(), ("--kernels", "auto")], ids=str)
def test_the_kernels_are_the_environments_unless_a_flag_says_otherwise(
    given: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[object] = []

    def load(*_: object, kernels: object, **__: object) -> object:
        chosen.append(kernels)
        raise ModelError("enough")

    monkeypatch.setenv("TRUEDRAFT_KERNELS", "off")
    monkeypatch.setattr("model.opening.load_model", load)
    monkeypatch.setattr("model.opening.find_kernels", lambda *_, **__: (None, ""))
    assert main(["verify", "--model", str(folder), "--report", str(tmp_path), *given]) == 1
    assert chosen == ["auto" if given else "torch"]


def test_a_report_that_cannot_be_written_costs_neither_the_verdict_nor_the_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").mkdir()
    arguments = flags(folder, "--case", "q001", "--report", tmp_path)
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("passed: ")
    assert len([line for line in shown.err.splitlines() if f"cannot write {tmp_path / 'report.json'}" in line]) == 1
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_the_list_names_cases_that_can_be_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(folder, "--list")) == 0
    lines = capsys.readouterr().out.splitlines()
    ids = [line.split()[0] for line in lines if re.match(r"[pq]\d{3}  batch=", line)]
    assert ids[0] == "p001"
    assert len(ids) > 50
    assert [line for line in lines if line.startswith("left out: ")]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--case", "q999"], "q999"),
        (["--case", "batch=3"], "batch = '3'"),
        (["--draft", "nobody"], "nobody"),
        (["--draft-model", "/nowhere/at/all"], "--draft-model"),
        (["--max-positions", "0"], "--max-positions"),
        (["--suite", "slow"], "slow"),
        (["--report", "/dev/null/folder", "--case", "p001"], "/dev/null/folder"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_code_1(
    more: list[str], match: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(flags(folder, *more))
    except SystemExit as exit_:
        code = exit_.code
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert code == 1
    assert len(errors) == 1
    assert match in errors[0]


def test_ctrl_c_ends_the_run_and_leaves_its_reports(folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "server", *flags(folder, "--report", tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "suite quick" in line:  # the run begins
                process.send_signal(signal.SIGINT)
                break
        said += process.stderr.readlines()
        assert process.wait(60) == 1
    assert said[-1] == "truedraft: interrupted\n"
    assert not [line for line in said if "Traceback" in line]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["interrupted"], report["passed"]) == (True, False)
    assert "not run" in {case["status"] for case in report["cases"]}
    assert (tmp_path / "report.html").exists()
