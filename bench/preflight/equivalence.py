"""The checklist's line about equivalence, out of a report of ``truedraft verify`` and of what was played."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.preflight.checklist import Answer, Line, Numbers
from bench.preflight.play import Played
from model.loader import LoadedModel
from server.commands import CommandError
from server.settings import Settings

NAME = "equivalence"
BOUNDED_POSITIONS = 4000


def verify_line(report: Mapping[str, Any]) -> Line:
    """``report``: see bench.verify; an interrupted or empty run proves nothing."""
    coverage: Mapping[str, Any] = report.get("coverage") or {}
    positions, cases = int(coverage.get("positions") or 0), int(coverage.get("cases_run") or 0)
    statuses = [case.get("status") for case in report.get("cases") or ()]
    failed = sum(status in ("failed", "error") for status in statuses)
    numbers: Numbers = {"positions": positions, "cases": cases, "failed": failed, "suite": str(report.get("suite"))}
    told = f"verify {report.get('suite')}: {positions:,} positions in {cases} cases"
    reference = report.get("reference") or {}
    if failed or reference.get("status") == "failed":
        what = f"{failed} cases differ or failed" if failed else "it differs from the reference run"
        return Line(NAME, "no", f"{told}, {what}", numbers)
    if report.get("interrupted") or not positions:
        return Line(
            NAME, "unknown", f"{told}, then it was interrupted" if positions else "verify compared nothing", numbers
        )
    if report.get("passed") is not True:
        why = f"reference run: {reference['reason']}" if reference.get("reason") else "verify did not pass"
        return Line(NAME, "no", f"{told}; {why}", numbers)
    return Line(NAME, "yes", f"{told}, 0 differences", numbers)


def with_played(line: Line, played: Played | None) -> Line:
    """``line`` and what the server answered with speculation off and on; a difference there is a no."""
    if played is None:
        return line
    same = f"{played.compared - played.different} of {played.compared} answers of a server identical, off and on"
    numbers = {**line.numbers, "answers_compared": played.compared, "answers_different": played.different}
    answer: Answer = "no" if played.different else line.answer
    return Line(line.name, answer, f"{line.reason}; {same}", numbers)


def run_verify(
    suite: str, settings: Settings, loaded: LoadedModel, folder: Path, report: Callable[[str], None]
) -> Line:
    """Run truedraft verify on ``loaded``, whose checkpoint lies in ``folder``; its executor is re-bound.

    ``suite`` is "quick", "bounded" (some of its cases, no reference run) or "none". Passes on an interruption.
    """
    from bench.verify.draft_model import find_draft
    from bench.verify.progress import Progress
    from bench.verify.run import Options, Verification

    if suite == "none":
        return Line(NAME, "unknown", "verify was not run (--verify none)")
    command = f"truedraft verify --model {shlex.quote(str(settings.model or 'default'))}"
    bounded = suite == "bounded"
    as_loaded = {name: getattr(settings, name) for name in ("dtype", "executor", "kernels", "num_threads")}
    draft, no_draft = find_draft(settings.draft_model, loaded, folder, report, **as_loaded)
    options = Options(
        max_positions=BOUNDED_POSITIONS if bounded else None,
        reference=None if bounded else folder,
        command=command,
        no_draft=no_draft,
    )
    report(f"truedraft verify, {suite}")
    try:
        verification = Verification(loaded, options, Progress(), draft)
        found = verification.run()
    except ValueError as error:
        raise CommandError(f"truedraft verify: {error}") from error
    if verification.ended is not None:
        raise verification.ended
    return verify_line({**found, "suite": suite})
