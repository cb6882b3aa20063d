"""What the ledger says when it finds something wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that a forward would have done wrong. Plain data; -1 where a number does not apply."""

    kind: str  # see docs/exactness.md
    step: int  # checked forwards, from 1
    seq_id: int
    position: int
    block: int
    slot: int
    expected: str
    found: str

    def __str__(self) -> str:
        where = "".join(
            f", {name} {value}"
            for name, value in (("position", self.position), ("block", self.block), ("slot", self.slot))
            if value >= 0
        )
        return (
            f"ledger, step {self.step}: {self.kind}: sequence {self.seq_id}{where}: "
            f"expected {self.expected}, found {self.found}"
        )

    def facts(self) -> dict[str, Any]:
        """For a structured log line."""
        return {f"ledger_{name}": value for name, value in asdict(self).items()}


class LedgerError(RuntimeError):
    """A forward that must not run, or a commit that must not stand."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(str(violation))
        self.violation = violation
