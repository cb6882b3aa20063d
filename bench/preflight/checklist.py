"""The go-live checklist: each line a question with its answer, the reason, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.foreign import read_file
from bench.preflight.cost import Range

Answer = Literal["yes", "no", "unknown"]
Numbers = Mapping[str, float | int | str | None]

MAX_ROW_COST = 0.5  # above, a draft's row costs more than half of what a plain row does: memory is not the bound
MIN_RATIO = 0.97  # the project's bar: with speculation at least 0.97 times as fast as without
MAX_FRAGMENTATION = 0.25  # of the allocated slots
MAX_RULES_BYTES = 16 * 2**20
AUDITS = "equivalence_audits_total"


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    answer: Answer
    reason: str
    numbers: Numbers = field(default_factory=dict)


def passed(lines: Iterable[Line]) -> bool:
    """Nothing says no."""
    return all(line.answer != "no" for line in lines)


def impossible_line(name: str, what: str, numbers: Numbers | None = None) -> Line:
    """Of a server whose numbers no server of ours can have: nothing follows from them."""
    return Line(name, "unknown", f"the server reports an impossible value: {what}", numbers or {})


def exactness_line(level: str, detail: str) -> Line:
    """L0 is the promise that the rest of the checklist relies on."""
    reason = f"{level}: {detail}" if detail else level
    return Line("exactness level", "yes" if level == "L0" else "no", reason, {"level": level})


def memory_bound_line(row_cost: Range, batch: float, k: int, bound: float) -> Line:
    """``row_cost``: StepCost.row_cost at ``batch`` with ``k`` drafts; ``bound``: StepCost.bound near there."""
    answer = decided(row_cost.high < MAX_ROW_COST, row_cost.low >= MAX_ROW_COST)
    noise = "; the timings are too noisy to tell" if answer == "unknown" else ""
    return Line(
        "memory-bound",
        answer,
        f"at batch {batch:.3g} a draft's row costs {row_cost.median:.2f} of a plain row ({row_cost.low:.2f} to "
        f"{row_cost.high:.2f}; memory-bound is below {MAX_ROW_COST}){noise}; with k = {k} no drafter can gain more "
        f"than {bound:.2f} times",
        {"row_cost": row_cost.median, "row_cost_low": row_cost.low, "row_cost_high": row_cost.high,
         "batch": batch, "k": k, "bound": bound},
    )  # fmt: skip


def decided(yes: bool, no: bool) -> Answer:
    """Unknown if the measurement allows neither."""
    return "yes" if yes else "no" if no else "unknown"


def slower_line(name: str, pairs: list[tuple[float, float]], what: str) -> Line:
    """``pairs``: (without, with speculation), in seconds, of interleaved rounds. "no" needs every round to agree."""
    if not pairs:
        return Line(name, "unknown", "nothing was measured")
    ratios = sorted(plain / speculative for plain, speculative in pairs)
    middle = ratios[len(ratios) // 2] if len(ratios) % 2 else sum(ratios[len(ratios) // 2 - 1 :][:2]) / 2
    plain = sorted(pair[0] for pair in pairs)[len(pairs) // 2]
    speculative = sorted(pair[1] for pair in pairs)[len(pairs) // 2]
    if middle >= MIN_RATIO:
        answer: Answer = "yes"
    else:
        answer = "no" if ratios[-1] < MIN_RATIO else "unknown"
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} rounds"
    verdict = {"yes": "not slower", "no": "slower in every round", "unknown": "the rounds disagree"}[answer]
    return Line(
        name,
        answer,
        f"{verdict}: {what} {1e3 * plain:.1f} ms without, {1e3 * speculative:.1f} ms with speculation, "
        f"{middle:.2f} times as fast ({spread}; the bar is {MIN_RATIO})",
        {"plain_ms": 1e3 * plain, "speculative_ms": 1e3 * speculative, "ratio": middle, "rounds": len(ratios),
         "ratio_low": ratios[0], "ratio_high": ratios[-1]},
    )  # fmt: skip


def fragmentation_line(ratios: list[float]) -> Line:
    """``ratios``: the gauge kv_fragmentation_ratio while requests ran."""
    name = "KV fragmentation"
    if not ratios:
        return Line(name, "unknown", "no request was running at any look at kv_fragmentation_ratio")
    mean, worst = sum(ratios) / len(ratios), max(ratios)
    reason = f"{mean:.1%} of the allocated slots are empty, {worst:.1%} at most ({len(ratios)} looks)"
    numbers = {"mean": mean, "max": worst, "looks": len(ratios)}
    wrong = next((ratio for ratio in ratios if not 0 <= ratio <= 1), None)
    if wrong is not None:
        return impossible_line(name, f"kv_fragmentation_ratio is {wrong:g}", numbers)
    if mean > MAX_FRAGMENTATION:
        return Line(name, "no", f"{reason}: above {MAX_FRAGMENTATION:.0%}; try a smaller block size", numbers)
    return Line(name, "yes", reason, numbers)


def rollback_line(rolled_back: float | None, drafted: float | None, moved_bytes: float | None) -> Line:
    name = "rollback"
    if rolled_back is None or moved_bytes is None:
        return Line(name, "unknown", "the server has no metrics of rollback")
    numbers = {"rolled_back": rolled_back, "drafted": drafted, "moved_bytes": moved_bytes}
    if not 0 <= rolled_back <= (drafted or 0):
        return impossible_line(name, f"{rolled_back:g} of {drafted or 0:g} draft tokens were rolled back", numbers)
    if moved_bytes:
        return Line(
            name, "no", f"{moved_bytes:,.0f} bytes of KV were moved to align sequences; it should be 0", numbers
        )
    if not drafted:
        return Line(name, "unknown", "no draft was verified while we looked", numbers)
    return Line(
        name,
        "yes",
        f"0 bytes of KV moved to roll back {rolled_back:,.0f} of {drafted:,.0f} draft tokens",
        numbers,
    )


def audit_line(rate: float | None, counts: Mapping[str, float] | None, enabled: float | None = None) -> Line:
    """``rate``: the server's setting audit_rate, None if it has none; ``counts``: audits by result, since its start;
    ``enabled``: the gauge equivalence_audits_enabled, None if it has none."""
    name = "audit"
    if rate is None or counts is None:
        return Line(name, "no", f"the server has no audits (no setting audit_rate or no metric {AUDITS})")
    numbers: Numbers = {"audit_rate": rate, **counts}
    told = ", ".join(f"{int(count)} {result}" for result, count in counts.items())
    if counts.get("mismatch"):
        return Line(name, "no", f"{int(counts['mismatch'])} audits found another output: {told}", numbers)
    if rate <= 0:
        return Line(name, "no", "no request is audited: audit_rate is 0", numbers)
    if enabled == 0:
        return Line(name, "no", f"audit_rate is {rate:g}, but the server has switched audits off: {told}", numbers)
    done = sum(count for result, count in counts.items() if result != "dropped")
    if not done:
        return Line(name, "unknown", f"audit_rate is {rate:g}, but no audit has ended yet ({told})", numbers)
    return Line(name, "yes", f"audit_rate is {rate:g}: {told}", numbers)


def alerts_line(rules: Path | None) -> Line:
    """``rules``: a Prometheus rule file, or a folder of such files; None if none is known."""
    name = "alerts"
    if rules is None:
        return Line(name, "unknown", "no rule file is known; name it with --rules")
    found = _alerts(rules)
    numbers: Numbers = {"alerts": len(found)}
    if not found:
        return Line(name, "no", f"{rules} holds no alert rule", numbers)
    watching = [alert for alert, expression in found.items() if AUDITS in expression]
    if not watching:
        reason = f"none of the {len(found)} alerts in {rules} watches truedraft_{AUDITS}"
        return Line(name, "no", reason, numbers)
    return Line(name, "yes", f"{len(found)} alerts in {rules}; {watching[0]} watches for mismatches", numbers)


def _alerts(rules: Path) -> dict[str, str]:
    """Expressions by alert; a file that is no rule file has none."""
    import yaml

    files = sorted([*rules.glob("**/*.yml"), *rules.glob("**/*.yaml")]) if rules.is_dir() else [rules]
    found: dict[str, str] = {}
    for file in files:
        try:
            content = yaml.safe_load(read_file(file, MAX_RULES_BYTES))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue
        groups = content.get("groups") if isinstance(content, dict) else None
        for group in groups if isinstance(groups, list) else ():
            for rule in (group.get("rules") or ()) if isinstance(group, dict) else ():
                if isinstance(rule, dict) and "alert" in rule:
                    found[str(rule["alert"])] = str(rule.get("expr", ""))
    return found
