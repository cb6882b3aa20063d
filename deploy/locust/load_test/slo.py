"""Service level objectives: bounds on the figures of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TIME = r"(?:ttft|itl|tpot|e2e|late)_(?:mean|p50|p90|p95|p99|max)"
_SHARES = ("failed", "shed", "cancelled")
_RATES = ("requests_per_second", "tokens_per_second")
_ACCEPTANCE = ("acceptance_rate", "acceptance_length")
_OBJECTIVE = re.compile(rf"\s*({_TIME}|{'|'.join((*_SHARES, *_RATES, *_ACCEPTANCE))})\s*(<|>)\s*([0-9.eE+-]+)\s*")
KNOWN = (
    "ttft, itl, tpot, e2e or late with _mean, _p50, _p90, _p95, _p99 or _max (seconds); failed, shed or cancelled "
    "(shares of all requests); requests_per_second, tokens_per_second, acceptance_rate, acceptance_length"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """``name`` must stay strictly below the bound, or strictly above."""

    name: str
    below: bool
    bound: float

    def __str__(self) -> str:
        return f"{self.name}{'<' if self.below else '>'}{self.bound:g}"

    def met(self, value: float | None) -> bool:
        """A figure that is not there meets nothing."""
        if value is None or math.isnan(value):
            return False
        return value < self.bound if self.below else value > self.bound


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """From ``name<bound,name>bound``; none if it is empty. Raises ValueError with the part that is wrong."""
    objectives = []
    for part in text.split(",") if text.strip() else ():
        found = _OBJECTIVE.fullmatch(part)
        try:
            bound = float(found[3]) if found is not None else math.nan
        except ValueError:
            bound = math.nan
        if found is None or not math.isfinite(bound):
            raise ValueError(f"--slo: {part.strip()!r} is no objective such as ttft_p95<0.5; the names are {KNOWN}")
        objectives.append(Objective(found[1], found[2] == "<", bound))
    return tuple(objectives)


def value_of(name: str, figures: Mapping[str, Any], server: Mapping[str, Any] | None) -> float | None:
    """Of a report's figures; acceptance is the server's own if it was asked, else that of the answers."""
    if name in _SHARES:
        return _as_number(figures["shares"][name])
    if name in _RATES:
        return _as_number(figures[name])
    if name in _ACCEPTANCE:
        key = name.removeprefix("acceptance_")
        source = figures if server is None else server
        return _as_number(source["acceptance"][key])
    times, _, statistic = name.partition("_")
    return _as_number(figures[times][statistic])


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def judge(
    objectives: tuple[Objective, ...], figures: Mapping[str, Any], server: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """One line of a report for each objective."""
    lines = []
    for objective in objectives:
        value = value_of(objective.name, figures, server)
        lines.append({"objective": str(objective), "value": value, "met": objective.met(value)})
    return lines
