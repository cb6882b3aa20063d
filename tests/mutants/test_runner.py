"""The runner itself, on made-up faults of a made-up project: only a test that saw a fault counts as a catch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.__main__ import _report
from tests.mutants.forks import NOT_IMPORTED, Outcome, Run
from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """\
import logging


def double(x):
    return 2 * x


def halves(x):
    while x > 1:
        x = x // 2
    return x


def careful(x):
    try:
        return double(x)
    except Exception:
        logging.getLogger(__name__).exception("it failed")
        return 0


class ModelError(Exception):
    pass


def gate(x):
    if x != 4:
        raise ModelError("not exact")
    return x
"""

TESTS = """\
import pytest

from kvcache.made_up import careful, double, gate, halves


@pytest.fixture
def four():
    return double(2) + 0


def test_double():
    assert double(2) == 4


def test_halves():
    assert halves(9) == 1


def test_careful():
    assert careful(3) == 6


def test_four(four):
    assert four == 4


@pytest.fixture
def gated():
    return gate(double(2))


def test_gated(gated):
    assert gated == 4
"""

CONFTEST = """\
from hypothesis import settings

settings.register_profile("truedraft")
"""

DRIVER = """\
import json, sys
from pathlib import Path
from tests.mutants.__main__ import check
from tests.mutants.mutant import Mutant

work, faults = Path(sys.argv[1]), json.loads(sys.argv[2])
mutants = [Mutant(tests=tuple(fault.pop("tests")), file="kvcache/made_up.py", **fault) for fault in faults]
problems = check(mutants, work / "scratch", 2, equivalence=False, project=work / "project", floor_s=3.0)
(work / "problems.json").write_text(json.dumps(problems))
"""

T = "tests/test_made_up.py"
FAULTS: dict[str, dict[str, Any]] = {
    "a real catch": {"old": "2 * x", "new": "3 * x", "tests": [f"{T}::test_double"]},
    "a survivor": {"old": "2 * x", "new": "x * 2", "tests": [T]},
    "a typo": {"old": "2 * x", "new": "2 * y", "tests": [f"{T}::test_double"]},
    "a wrong type": {"old": "2 * x", "new": '2 * x + "1"', "tests": [f"{T}::test_double"]},
    "a declared wrong type": {
        "old": "2 * x",
        "new": "None + x",
        "tests": [f"{T}::test_double"],
        "may_raise": "that is what it does",
    },
    "an attribute that is not there": {"old": "2 * x", "new": "x.twice", "tests": [f"{T}::test_double"]},
    "a typo whose exception is logged": {"old": "2 * x", "new": "2 * y", "tests": [f"{T}::test_careful"]},
    "no program": {"old": "2 * x", "new": "2 *", "tests": [f"{T}::test_double"]},
    "an error in a fixture": {"old": "2 * x", "new": "[][x]", "tests": [f"{T}::test_four"]},
    "a real exception": {"old": "2 * x", "new": "[][x]", "tests": [f"{T}::test_double"]},
    "a model that is refused": {"old": "2 * x", "new": "3 * x", "tests": [f"{T}::test_gated"]},
    "a hang": {"old": "x // 2", "new": "x // 1", "tests": [f"{T}::test_halves"]},
    "a declared hang": {"old": "x // 2", "new": "x // 1", "tests": [f"{T}::test_halves"], "may_hang": True},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """What the runner printed of ``FAULTS``, and the problems it found. It forks, so it has a process of its own."""
    work = tmp_path_factory.mktemp("made-up")
    (work / "scratch").mkdir()
    project = work / "project"
    files = {"kvcache/made_up.py": SOURCE, "tests/test_made_up.py": TESTS, "tests/conftest.py": CONFTEST}
    for name, text in {**files, "pyproject.toml": "[tool.pytest.ini_options]\n"}.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    faults = json.dumps([{"name": name, **fault} for name, fault in FAULTS.items()])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(work), faults],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((work / "problems.json").read_text())


def said(ran: tuple[str, list[str]], name: str) -> tuple[str, str]:
    """The table's part on ``name``, and its problem or ""."""
    text, problems = ran
    part = text.split(f"\n{name}  [")[1].split("\n\n")[0]
    (problem,) = [problem for problem in problems if problem.startswith(f"{name}: ")] or [""]
    return part, problem


@pytest.mark.parametrize(
    "name",
    ["a real catch", "a real exception", "a declared wrong type", "a declared hang", "a model that is refused"],
)
def test_a_test_that_sees_the_fault_catches_it(ran: tuple[str, list[str]], name: str) -> None:
    part, problem = said(ran, name)
    assert "    caught: " in part
    assert "test_made_up.py::test_" in part
    assert problem == ""


def test_the_table_says_why_a_test_failed(ran: tuple[str, list[str]]) -> None:
    assert "AssertionError: assert 6 == 4" in said(ran, "a real catch")[0]
    assert "IndexError: list index out of range" in said(ran, "a real exception")[0]
    assert "it hung in tests/test_made_up.py::test_halves" in said(ran, "a declared hang")[0]


def test_a_survivor_is_a_problem(ran: tuple[str, list[str]]) -> None:
    part, problem = said(ran, "a survivor")
    assert "    survived: 5 tests" in part
    assert "SURVIVED" in problem


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a typo", "NameError on the changed lines (kvcache/made_up.py:5: name 'y' is not defined)"),
        ("a wrong type", "TypeError on the changed lines"),
        ("an attribute that is not there", "AttributeError on the changed lines"),
        ("a typo whose exception is logged", "NameError on the changed lines"),
        ("no program", "SyntaxError on the changed lines"),
        ("an error in a fixture", "IndexError in setup"),
    ],
)
def test_a_slip_in_the_edit_is_no_catch(ran: tuple[str, list[str]], name: str, why: str) -> None:
    part, problem = said(ran, name)
    assert "    broken mutant: " in part
    assert why in part
    assert "BROKEN MUTANT" in problem


def test_a_hang_is_no_catch_unless_the_catalogue_says_that_it_may_hang(ran: tuple[str, list[str]]) -> None:
    part, problem = said(ran, "a hang")
    assert "    timeout: it hung in tests/test_made_up.py::test_halves" in part
    assert "TIMEOUT" in problem


@pytest.mark.parametrize(("unseen", "problems"), [("it watches", 0), ("", 1)])
def test_the_equivalence_suite_need_not_run_what_it_cannot_see(unseen: str, problems: int, tmp_path: Path) -> None:
    mutant = Mutant("one", "a.py", "1", "2", ("t",), unseen=unseen)
    run = Run("one", tmp_path, ("t",))
    caught = Outcome(run, 1.0, failed="t", kind="AssertionError", phase="call", why="AssertionError: 1")
    elsewhere = Outcome(run, 1.0, broken=f"{NOT_IMPORTED} a.py", num_tests=3)
    assert len(_report(mutant, {False: caught, True: elsewhere})) == problems
