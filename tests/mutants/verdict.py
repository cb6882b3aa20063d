"""What the end of a run says about the mutant: caught, survived, or nothing, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.mutants.forks import Outcome
from tests.mutants.mutant import Mutant

# Raised anywhere in the mutated file these say that the edit is not a program; so do the others on its own lines.
_NEVER_MEANT = {"NameError", "ImportError", "SyntaxError"}
_GATE = "ModelError"  # a model that is not exact is not loaded: what the fault did was seen
_SLIPS = {*_NEVER_MEANT, "AttributeError", "TypeError"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``text`` says which test and why. Only "caught" and "survived" prove something."""

    kind: Literal["caught", "survived", "timeout", "broken mutant", "no run"]
    text: str


def judge(mutant: Mutant, outcome: Outcome) -> Verdict:
    """Caught by a failed test, and by a hang or by what looks like a slip of the edit only if the catalogue says so."""
    seconds = f"{outcome.seconds:.1f} s"
    if outcome.timed_out:
        limit = f"after {outcome.run.limit_s:.0f} s, many times what it takes without a fault"
        if not outcome.current:
            return Verdict("no run", f"no test began, ended {limit}")
        where = f"it hung in {outcome.current}, ended {limit}"
        return Verdict("caught", where) if mutant.may_hang else Verdict("timeout", where)
    if outcome.kind == "TimeoutError" and not mutant.may_hang:
        return Verdict("timeout", f"{outcome.failed} waited no longer, {seconds}: {outcome.why}")
    slip = _slip(mutant, outcome)
    if slip and not mutant.may_raise:
        return Verdict("broken mutant", f"{slip}, in {outcome.failed or 'collecting the tests'}: {outcome.why}")
    if outcome.broken:
        return Verdict("no run", f"{outcome.broken}: {outcome.why}" if outcome.why else outcome.broken)
    if not outcome.failed:
        return Verdict("survived", f"{outcome.num_tests} tests, {seconds}")
    why = outcome.why if outcome.kind in outcome.why.split(": ")[0] else f"{outcome.kind}: {outcome.why}"
    return Verdict("caught", f"{outcome.failed}, {seconds}\n        {why}")


def _slip(mutant: Mutant, outcome: Outcome) -> str:
    """Why a failure may come from the edit's own text; "" if it comes from what the edit does."""
    for raised in outcome.raised:
        if raised.file != mutant.file:
            continue
        changed = mutant.first_line(outcome.run.source), mutant.last_line(outcome.run.source)
        own = changed[0] <= raised.line <= changed[1]
        if _NEVER_MEANT & set(raised.kinds) or (own and _SLIPS & set(raised.kinds)):
            lines = "the changed lines" if own else "the changed file"
            return f"{raised.kinds[0]} on {lines} ({raised.file}:{raised.line}: {raised.message})"
    if outcome.phase not in ("", "call", "teardown") and outcome.kind != _GATE:
        return f"{outcome.kind} in {outcome.phase}, before a test could look"
    return ""
