"""Test runs in forked processes: each runs pytest on its own copy of the project.

The parent has imported torch, pytest and hypothesis, but none of our modules, so a run starts at once and imports the
copy's. It has no thread of its own when it forks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kvcache", "model", "specdec", "scheduler", "server", "bench")
_COPIED = (*ROOMS, "tests", "docs", "deploy", "pyproject.toml", "README.md", "constraints.txt")


@dataclass(frozen=True, slots=True)
class Run:
    """What to run: ``selections`` and ``keyword`` (``-k``) as pytest takes them, in the copy at ``folder``."""

    name: str
    folder: Path
    selections: tuple[str, ...]
    keyword: str = ""
    mutated: str = ""  # the file with the fault: it must have been imported
    home: Path | None = None  # what is taken from this cache (TRUEDRAFT_HOME); nothing is ever written into it
    source: str = ""  # what that file was without the fault
    own_kernels: bool = False  # build the kernels from the copy's sources
    limit_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a test failed with, that led to it, or that was logged."""

    kinds: tuple[str, ...]  # its class and the classes above that
    file: str  # the innermost place in the copy of the project, relative to it
    line: int
    message: str


NOT_IMPORTED = "no test imported"


@dataclass(frozen=True, slots=True)
class Outcome:
    """``failed`` is the first failing test, "" if all passed; ``broken`` says why the run proves nothing."""

    run: Run
    seconds: float
    timed_out: bool = False
    current: str = ""  # the test that ran last
    failed: str = ""
    kind: str = ""  # of the failure: the exception's class
    phase: str = ""  # setup, call, teardown or collection
    why: str = ""  # the failure's own line
    raised: tuple[Raised, ...] = ()
    num_tests: int = 0
    durations: dict[str, float] = field(default_factory=dict)  # seconds by test, fixtures included
    broken: str = ""

    @property
    def log(self) -> Path:
        return self.run.folder / "log.txt"


def copy_project(source: Path, target: Path) -> None:
    """Copy what tests need, file times included, so that bytecode stays valid."""
    target.mkdir(parents=True)
    for name in _COPIED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns(".*", "*.egg-info"))
        elif (source / name).exists():
            shutil.copy2(source / name, target / name)


def run_all(runs: Sequence[Run], jobs: int) -> Iterator[Outcome]:
    """Run up to ``jobs`` at a time; outcomes come as they end. Leaves no process behind."""
    waiting = list(runs)[::-1]
    running: dict[int, tuple[Run, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop()
                running[_start(run)] = (run, time.monotonic())
            for pid, (run, began) in list(running.items()):
                seconds = time.monotonic() - began
                ended = os.waitpid(pid, os.WNOHANG)[0] == pid
                if not ended and seconds < run.limit_s:
                    continue
                del running[pid]
                _end(pid, ended)  # whatever the tests have started goes too
                yield _outcome(run, seconds, timed_out=not ended)
            time.sleep(0.02)
    finally:
        for pid in running:
            _end(pid, False)


def _start(run: Run) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            code = _child(run)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)  # none of the parent's clean-up is ours
    return pid


def _end(pid: int, ended: bool) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # it may not have made its group yet
        os.waitpid(pid, 0)


def _child(run: Run) -> int:
    os.chdir(run.folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _import_only_from(run.folder)
    if run.home is not None:
        _lend_home(run)
    recorder = _Recorder(run.folder.resolve() / "outcome.json")
    arguments = ["-x", "-q", "--hypothesis-seed=0", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", "."]
    arguments += ["-o", "timeout=0"]  # a hang is ours to see, by a limit that knows how long the tests take
    # The parent has imported plugins for everybody.
    arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    if run.keyword:
        arguments += ["-k", run.keyword]
    code = int(pytest.main([*arguments, *run.selections], plugins=[recorder]))
    recorder.facts["broken"] = _what_is_wrong(run, code, recorder.facts)
    recorder.write()
    sys.stdout.flush()
    sys.stderr.flush()
    return 0


def _import_only_from(folder: Path) -> None:
    """Forget our modules, and let neither this folder nor an editable installation supply them."""
    for name in list(sys.modules):
        if name.split(".")[0] in (*ROOMS, "tests"):
            del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
    sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() not in (ROOT, folder))]
    os.environ["PYTHONPATH"] = str(folder)  # for the processes that tests start


def _lend_home(run: Run) -> None:
    """A cache of its own, so that nothing measured with a fault is ever found by anybody; big things are links."""
    assert run.home is not None
    mine = run.folder / "home"
    mine.mkdir()
    os.environ["TRUEDRAFT_HOME"] = str(mine)
    for entry in run.home.iterdir() if run.home.is_dir() else ():
        if entry.is_dir() and entry.name != "checks" and not (run.own_kernels and entry.name == "kernels"):
            (mine / entry.name).symlink_to(entry)


def _what_is_wrong(run: Run, code: int, facts: dict[str, Any]) -> str:
    if code not in (0, 1) or (code == 1 and not facts["failed"]):
        return f"pytest ended with code {code}; each selection must exist"
    imported: set[Path] = set()
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ROOMS and (file := getattr(module, "__file__", None)):
            if not Path(file).is_relative_to(run.folder):
                return f"{name} came from {file}, not from the copy"
            imported.add(Path(file))
    if run.mutated.endswith(".py") and run.folder / run.mutated not in imported:
        return f"{NOT_IMPORTED} {run.mutated}"
    return ""


_NOTHING: dict[str, Any] = {
    "current": "",
    "failed": "",
    "kind": "",
    "phase": "",
    "why": "",
    "raised": [],
    "num_tests": 0,
    "durations": {},
    "broken": "it died before the first test",
}


class _Recorder(logging.Handler):
    """A pytest plugin that writes down which test runs, and how the first that failed did."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self.facts: dict[str, Any] = {**_NOTHING, "raised": [], "durations": {}, "broken": "it died"}

    def write(self) -> None:
        self._path.write_text(json.dumps(self.facts), encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """An exception that the engine survives is no less a slip."""
        if record.exc_info and record.exc_info[1] is not None and not self.facts["failed"]:
            self._note(record.exc_info[1])

    def pytest_configure(self) -> None:
        """After the conftest: a counterexample is enough, nobody reads its simplest form."""
        settings.register_profile(
            "mutants", settings.get_profile("truedraft"), phases=(Phase.explicit, Phase.generate), database=None
        )
        settings.load_profile("mutants")
        logging.getLogger().addHandler(self)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.facts["current"] = nodeid
        self.facts["num_tests"] += 1
        self.facts["raised"] = []
        self.write()

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]) -> None:
        """Comes behind the test's report."""
        if call.excinfo is not None and not self.facts["kind"]:
            self.facts["kind"] = call.excinfo.type.__name__
            self._note(call.excinfo.value)
            self.write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.facts["failed"]:
            self.facts.update(phase="collection", why=_last_line(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        durations = self.facts["durations"]
        durations[report.nodeid] = durations.get(report.nodeid, 0.0) + report.duration
        if report.failed and not self.facts["failed"]:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(getattr(crash, "message", report.longrepr))
            why = next(iter(text.strip().splitlines()), "")
            self.facts.update(failed=report.nodeid, phase=report.when, why=why)
            self.write()

    def _note(self, error: BaseException) -> None:
        """``error``, and what it came from."""
        root = self._path.parent
        waiting: list[BaseException | None] = [error]
        seen: set[int] = set()
        while waiting:
            one = waiting.pop()
            if one is None or id(one) in seen:
                continue
            seen.add(id(one))
            waiting += [one.__cause__, one.__context__]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            places = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(one.__traceback__)]
            if isinstance(one, SyntaxError):
                places.append((one.filename or "", one.lineno or 0))
            ours = [(Path(file).resolve(), line) for file, line in places]
            ours = [(file, line) for file, line in ours if file.is_relative_to(root)]
            file, line = ours[-1] if ours else (root, 0)
            kinds = [kind.__name__ for kind in type(one).__mro__]
            message = next(iter(str(one).splitlines()), "")
            self.facts["raised"].append([kinds, str(file.relative_to(root)), line, message])


def _last_line(text: object) -> str:
    return next(iter(str(text).strip().splitlines()[::-1]), "")


def _outcome(run: Run, seconds: float, *, timed_out: bool) -> Outcome:
    try:
        facts = json.loads((run.folder / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = dict(_NOTHING)
    facts["raised"] = tuple(Raised(tuple(kinds), *rest) for kinds, *rest in facts["raised"])
    return Outcome(run, seconds, timed_out, **facts)
