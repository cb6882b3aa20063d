"""The exactness level of a loaded model, and what it was decided by. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from model.errors import ModelError


@dataclass(frozen=True, slots=True)
class ExactnessCheck:
    name: str  # e.g. "17 rows"
    passed: bool
    detail: str  # what was compared; of a failed one: which rows differ and by how much


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    """What the probe found."""

    level: Literal["L0", "L2"]
    checks: tuple[ExactnessCheck, ...]
    detail: str  # one line for people
    tile_classes: tuple[int, ...] = ()  # that a tiled executor may use; empty for the others
    padding: str = "none"  # what the level costs: rows that are computed for nobody
    cached: bool = field(default=False, compare=False)  # read from the cache of an earlier start, not measured in this

    def with_checks(self, checks: Sequence[ExactnessCheck]) -> ExactnessReport:
        """This report and more checks: one that failed takes the level down and stands in the detail."""
        failed = [f"{check.name}: {check.detail}" for check in checks if not check.passed]
        detail = "; ".join([*failed, self.detail])
        return replace(self, level="L2" if failed else self.level, checks=(*self.checks, *checks), detail=detail)

    @property
    def summary(self) -> str:
        """For a log: the level, whether it was measured now, and the padding."""
        origin = "from the cache" if self.cached else "measured now"
        return f"exactness {self.level} ({origin}; padding: {self.padding})"

    @property
    def line(self) -> str:
        """The summary and the reason."""
        return f"{self.summary}: {self.detail}"

    def require_exact(self, name: str) -> None:
        """Raise ModelError with the reason unless the level is L0. ``name``: the model's, for the message."""
        if self.level != "L0":
            raise ModelError(f"{name} reaches exactness {self.level} only, and L0 is required: {self.detail}")
