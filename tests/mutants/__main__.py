"""``python -m tests.mutants [--short] [--only TEXT] [--jobs N]``: shows that our tests catch every fault.

First the same tests run on the unmutated project: they must pass there. Exit code 0 only if every fault was caught.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Before anything starts a thread: a process that forks must have none, and two runs share the cores.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from tests.mutants.catalogue import EQUIVALENCE, MUTANTS
from tests.mutants.forks import NOT_IMPORTED, ROOT, Outcome, Run, copy_project, run_all
from tests.mutants.mutant import Mutant, StaleEdit
from tests.mutants.verdict import judge

# A mutated run may take so many times what it takes without the fault, and never less than the floor.
LIMIT_FACTOR, LIMIT_FLOOR_S = 10.0, 120.0
CLEAN_LIMIT_S = 3600.0
BUILD_LIMIT_S = 900.0  # of a mutant that has the kernels built anew


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form for CI: no compiled faults, no second column")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults with TEXT in their name or file")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: all cores)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the mutated copies and their logs")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if options.only in m.name or options.only in m.file]
    chosen = [m for m in chosen if not (options.short and m.compiled)]
    if not chosen:
        parser.error(f"no fault has {options.only!r} in its name or file")

    began = time.monotonic()
    _import_ahead()
    scratch = Path(tempfile.mkdtemp(prefix="truedraft-mutants-"))
    try:
        problems = check(chosen, scratch, options.jobs, equivalence=not options.short, home=_home())
    except StaleEdit as error:
        problems = [str(error)]
    finally:
        if options.keep:
            print(f"kept: {scratch}")
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    for problem in problems:
        print(f"\nPROBLEM: {problem}")
    print(f"\n{len(chosen)} faults, {len(problems)} problems, {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


def _import_ahead() -> None:
    """What the runs need, imported once. None of it is ours, and none of it starts a thread."""
    for name in ("numpy", "torch", "hypothesis", "transformers.models.llama.modeling_llama", "gguf", "asyncio"):
        importlib.import_module(name)


def check(
    mutants: Sequence[Mutant],
    scratch: Path,
    jobs: int,
    *,
    equivalence: bool,
    home: Path | None = None,
    project: Path = ROOT,
    floor_s: float = LIMIT_FLOOR_S,
) -> list[str]:
    """Try ``mutants`` on copies of ``project`` in ``scratch``, print a verdict each, and return what is wrong."""
    clean = _Clean(scratch, home, project, floor_s)
    problems = clean.run(mutants, jobs, equivalence=equivalence)
    if problems:
        return problems
    planned = []
    for number, mutant in enumerate(mutants):
        folder = scratch / f"{number:02}"
        planned.append(_plan(mutant, clean, folder, mutant.tests, ""))
        if equivalence:
            planned.append(_plan(mutant, clean, scratch / f"{number:02}-equivalence", EQUIVALENCE, mutant.subject))
    by_name = {mutant.name: mutant for mutant in mutants}
    found: dict[str, dict[bool, Outcome]] = {}
    for outcome in run_all(planned, jobs):
        mutant = by_name[outcome.run.name]
        alone = outcome.run.selections == EQUIVALENCE
        found.setdefault(mutant.name, {})[alone] = outcome
        if len(found[mutant.name]) == 1 + equivalence:
            problems += _report(mutant, found[mutant.name])
    return problems


def _plan(mutant: Mutant, clean: _Clean, folder: Path, tests: tuple[str, ...], keyword: str) -> Run:
    shutil.copytree(
        clean.folder, folder, symlinks=True, ignore=shutil.ignore_patterns("home", "log.txt", "outcome.json")
    )
    source = (folder / mutant.file).read_text(encoding="utf-8")
    mutant.apply(folder)
    limit_s = clean.limit_s(tests, keyword) + BUILD_LIMIT_S * mutant.compiled
    return Run(
        mutant.name,
        folder,
        tests,
        keyword,
        mutated=mutant.file,
        source=source,
        home=clean.home,
        own_kernels=mutant.compiled,
        limit_s=limit_s,
    )


class _Clean:
    """The same selections without a fault: they must pass, and how long they take says when a mutated run hangs."""

    def __init__(self, scratch: Path, home: Path | None, project: Path, floor_s: float) -> None:
        self.folder = scratch / "clean"
        self.home = home
        self._scratch, self._project, self._floor_s = scratch, project, floor_s
        self._durations: dict[str, float] = {}  # by test
        self._start_s = 0.0  # what a run takes beside its tests
        self._alike_s: dict[str, float] = {}  # of the equivalence suite, by subject

    def run(self, mutants: Sequence[Mutant], jobs: int, *, equivalence: bool) -> list[str]:
        """Returns what is wrong. Also fills the bytecode that the copies inherit."""
        selections = list(dict.fromkeys(s for mutant in mutants for s in mutant.tests))
        parts = 2 * jobs  # some selections take far longer than others: who is done early takes another part
        shares = [share for i in range(parts) if (share := tuple(selections[i::parts]))]
        runs = [self._plan("clean" if i == 0 else f"clean-{i}", share, "") for i, share in enumerate(shares)]
        for i, subject in enumerate(sorted({mutant.subject for mutant in mutants}) if equivalence else ()):
            runs.append(self._plan(f"clean-equivalence-{i}", EQUIVALENCE, subject))
        problems = []
        for outcome in run_all(runs, jobs):
            print(f"no fault: {outcome.num_tests} tests in {outcome.seconds:.1f} s", flush=True)
            if outcome.failed or outcome.broken or outcome.timed_out:
                problems.append(f"without a fault {_failure(outcome)}")
            if outcome.run.keyword:
                self._alike_s[outcome.run.keyword] = outcome.seconds
            else:
                self._durations.update(outcome.durations)
                self._start_s = max(self._start_s, outcome.seconds - sum(outcome.durations.values()))
        return problems

    def limit_s(self, selections: tuple[str, ...], keyword: str) -> float:
        """When a run of ``selections`` with a fault counts as hanging."""
        expected = self._alike_s.get(keyword, 0.0)
        if not keyword:
            inside = tuple(selection + end for selection in selections for end in ("::", "["))
            tests = [test for test in self._durations if test in selections or test.startswith(inside)]
            expected = self._start_s + sum(self._durations[test] for test in tests)
        return max(self._floor_s, LIMIT_FACTOR * expected)

    def _plan(self, name: str, selections: tuple[str, ...], keyword: str) -> Run:
        folder = self._scratch / name
        copy_project(self._project, folder)
        return Run("no fault", folder, selections, keyword, home=self.home, limit_s=CLEAN_LIMIT_S)


def _report(mutant: Mutant, outcomes: dict[bool, Outcome]) -> list[str]:
    own = judge(mutant, outcomes[False])
    print(f"\n{mutant.name}  [{mutant.file}]\n    {own.kind}: {own.text}", flush=True)
    problems = []
    if own.kind != "caught":
        log = "" if own.kind == "survived" else f"\n{_log(outcomes[False])}"
        problems.append(f"{mutant.name}: {own.kind.upper()}: {own.text}{log}")
    if True in outcomes:
        alike = judge(mutant, outcomes[True])
        expected = f" (as expected: {mutant.unseen})" if mutant.unseen and alike.kind == "survived" else ""
        print(f"    equivalence suite alone: {alike.kind}: {alike.text}{expected}", flush=True)
        if mutant.unseen and outcomes[True].broken.startswith(NOT_IMPORTED):
            return problems  # the fault is outside of what it runs
        if alike.kind not in ("caught", "survived"):
            problems.append(f"{mutant.name}: equivalence suite: {alike.kind}: {alike.text}\n{_log(outcomes[True])}")
        elif (alike.kind == "caught") == bool(mutant.unseen):
            what = f"sees it, against {mutant.unseen!r}" if mutant.unseen else "does not see it"
            problems.append(f"{mutant.name}: the equivalence suite {what}")
    return problems


def _failure(outcome: Outcome) -> str:
    what = f"it takes more than {outcome.run.limit_s:.0f} s" if outcome.timed_out else outcome.broken or outcome.failed
    return f"{what} ({outcome.why})\n{_log(outcome)}"


def _log(outcome: Outcome) -> str:
    try:
        return "\n".join(outcome.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
    except OSError:
        return ""


def _home() -> Path:
    from model.model_cache import default_home  # the child forgets this module again

    return default_home()


if __name__ == "__main__":
    sys.exit(main())
