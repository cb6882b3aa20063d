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
from tests.mutants.forks import ROOT, Outcome, Run, copy_project, run_all
from tests.mutants.mutant import Mutant, StaleEdit

SHORT_LIMIT_S, LONG_LIMIT_S = 180.0, 1200.0


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
        problems = _check(chosen, scratch, options.jobs, equivalence=not options.short)
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


def _check(mutants: Sequence[Mutant], scratch: Path, jobs: int, *, equivalence: bool) -> list[str]:
    clean = scratch / "clean"
    copy_project(ROOT, clean)
    home = _home()
    problems = _check_clean(mutants, clean, scratch, home, jobs, equivalence=equivalence)
    if problems:
        return problems
    runs: dict[str, Mutant] = {}
    planned = []
    for number, mutant in enumerate(mutants):
        folder = scratch / f"{number:02}"
        planned.append(_plan(mutant, clean, folder, mutant.tests, home, SHORT_LIMIT_S, ""))
        if equivalence:
            alike = scratch / f"{number:02}-equivalence"
            planned.append(_plan(mutant, clean, alike, EQUIVALENCE, home, LONG_LIMIT_S, mutant.subject))
        runs[mutant.name] = mutant
    found: dict[str, dict[bool, Outcome]] = {}
    for outcome in run_all(planned, jobs):
        mutant = runs[outcome.run.name]
        alone = outcome.run.selections == EQUIVALENCE
        found.setdefault(mutant.name, {})[alone] = outcome
        if len(found[mutant.name]) == 1 + equivalence:
            problems += _report(mutant, found[mutant.name])
    return problems


def _plan(
    mutant: Mutant, clean: Path, folder: Path, tests: tuple[str, ...], home: Path, limit_s: float, keyword: str
) -> Run:
    shutil.copytree(clean, folder, symlinks=True, ignore=shutil.ignore_patterns("home", "log.txt", "outcome.json"))
    mutant.apply(folder)
    limit_s += 300.0 * mutant.compiled
    return Run(mutant.name, folder, tests, keyword, mutant.file, home, own_kernels=mutant.compiled, limit_s=limit_s)


def _check_clean(
    mutants: Sequence[Mutant], clean: Path, scratch: Path, home: Path, jobs: int, *, equivalence: bool
) -> list[str]:
    """The same selections must pass without a fault; this also fills the bytecode that the copies inherit."""
    selections = list(dict.fromkeys(s for mutant in mutants for s in mutant.tests))
    shares = [tuple(selections[i::jobs]) for i in range(jobs)]
    runs = [Run("no fault", clean, shares[0], home=home, limit_s=LONG_LIMIT_S)]
    for i, share in enumerate(shares[1:], start=1):
        if share:
            copy_project(ROOT, scratch / f"clean-{i}")
            runs.append(Run("no fault", scratch / f"clean-{i}", share, home=home, limit_s=LONG_LIMIT_S))
    if equivalence:
        for i, subject in enumerate(sorted({mutant.subject for mutant in mutants})):
            folder = scratch / f"clean-equivalence-{i}"
            copy_project(ROOT, folder)
            runs.append(Run("no fault", folder, EQUIVALENCE, subject, home=home, limit_s=LONG_LIMIT_S))
    problems = []
    for outcome in run_all(runs, jobs):
        print(f"no fault: {outcome.num_tests} tests in {outcome.seconds:.1f} s", flush=True)
        if outcome.failed or outcome.broken:
            problems.append(f"without a fault {_failure(outcome)}")
    return problems


def _report(mutant: Mutant, outcomes: dict[bool, Outcome]) -> list[str]:
    own = outcomes[False]
    print(f"\n{mutant.name}  [{mutant.file}]\n    {_verdict(own)}", flush=True)
    problems = []
    if own.broken or not own.failed:
        problems.append(f"{mutant.name}: {_failure(own) if own.broken else 'SURVIVED ' + ', '.join(mutant.tests)}")
    if alike := outcomes.get(True):
        expected = f" (as expected: {mutant.unseen})" if mutant.unseen and not alike.failed else ""
        print(f"    equivalence suite alone: {_verdict(alike)}{expected}", flush=True)
        if alike.broken:
            problems.append(f"{mutant.name}: equivalence suite: {_failure(alike)}")
        elif bool(alike.failed) == bool(mutant.unseen):
            what = f"sees it, against {mutant.unseen!r}" if mutant.unseen else "does not see it"
            problems.append(f"{mutant.name}: the equivalence suite {what}")
    return problems


def _verdict(outcome: Outcome) -> str:
    if outcome.broken:
        return f"proves nothing: {outcome.broken}"
    if not outcome.failed:
        return f"not caught by {outcome.num_tests} tests, {outcome.seconds:.1f} s"
    how = "by timeout in" if outcome.timed_out else "by"
    return f"caught {how} {outcome.failed}, {outcome.seconds:.1f} s"


def _failure(outcome: Outcome) -> str:
    try:
        log = outcome.log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:]
    except OSError:
        log = []
    return "\n".join([f"{outcome.broken or outcome.failed} ({outcome.why})", *log])


def _home() -> Path:
    from model.model_cache import default_home  # the child forgets this module again

    return default_home()


if __name__ == "__main__":
    sys.exit(main())
