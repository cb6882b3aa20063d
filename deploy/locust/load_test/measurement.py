"""Which requests of a run count, and where they are counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .record import Record
from .tally import Tally


@dataclass(slots=True)
class Step:
    """One step of a step load. Requests count from ``count_from`` on: those before warm it up."""

    users: int
    began: float
    count_from: float
    tally: Tally = field(default_factory=Tally)


class Measurement:
    """A request counts if it was sent after the warm-up. It belongs to the step in which it was sent."""

    def __init__(self) -> None:
        self.total = Tally()
        self.classes: dict[str, Tally] = {}
        self.steps: list[Step] = []
        self.warm_up: Counter[str] = Counter()  # outcomes of requests that do not count
        self.num_unfinished = 0  # cut off when the test ended; in no other number
        self._count_from = 0.0

    def begin(self, now: float, warm_up: float) -> None:
        """Forget everything. A step that has begun goes on: locust names the first one before the test begins."""
        step = self.steps[-1].users if self.steps else None
        self.total, self.classes, self.steps = Tally(), {}, []
        self.warm_up.clear()
        self.num_unfinished = 0
        self._count_from = now + warm_up
        if step is not None:
            self.next_step(step, now, warm_up)

    def next_step(self, users: int, now: float, warm_up: float) -> None:
        self.steps.append(Step(users, now, now + warm_up))

    def add(self, record: Record) -> bool:
        """Whether it counts."""
        if record.outcome == "open":
            self.num_unfinished += 1
            return False
        step = next((step for step in reversed(self.steps) if step.began <= record.sent), None)
        if record.sent < (self._count_from if step is None else max(step.count_from, self._count_from)):
            self.warm_up[record.outcome] += 1
            return False
        self.total.add(record)
        self.classes.setdefault(record.kind, Tally()).add(record)
        if step is not None:
            step.tally.add(record)
        return True

    def figures(self) -> dict[str, Any]:
        """Those of a report."""
        return {
            "total": self.total.figures(),
            "classes": {kind: tally.figures() for kind, tally in sorted(self.classes.items())},
            "steps": [{"users": step.users, "figures": step.tally.figures()} for step in self.steps],
            "warm_up": dict(self.warm_up),
            "unfinished": self.num_unfinished,
        }

    def to_plain(self) -> dict[str, Any]:
        """What a worker sends, without steps: only the master knows them."""
        return {
            "total": self.total.to_plain(),
            "classes": {kind: tally.to_plain() for kind, tally in self.classes.items()},
            "warm_up": dict(self.warm_up),
            "unfinished": self.num_unfinished,
        }

    def merge_plain(self, plain: dict[str, Any]) -> None:
        """Add what a worker has sent."""
        self.total.merge(Tally.from_plain(plain["total"]))
        for kind, tally in plain["classes"].items():
            self.classes.setdefault(kind, Tally()).merge(Tally.from_plain(tally))
        self.warm_up.update(plain["warm_up"])
        self.num_unfinished += plain["unfinished"]
