"""What speculation costs, as plain data for people and dashboards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

from specdec.draft_length.cost import StepCost
from specdec.drafters.base import CostlyDrafter, Drafter

SHOWN_ROWS = (1, 8, 32)  # of a costly drafter's round


@runtime_checkable
class RememberingDrafter(Protocol):
    """A drafter that keeps texts, within a bound."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def max_memory_bytes(self) -> int: ...


def describe_speculation(drafters: Mapping[str, Drafter], cost: StepCost | None) -> dict[str, Any]:
    """``drafters``: of each its name and costs, None for those it does not have; ``step_seconds``: the curve of a step.

    Plain numbers of this moment. May be called from any thread while steps run: it reads single numbers, each of them
    whole.
    """
    return {
        "drafters": [{"name": name, **describe_drafter(drafter)} for name, drafter in drafters.items()],
        "step_seconds": None if cost is None else _points(cost.points),
    }


def describe_drafter(drafter: Drafter | None) -> dict[str, Any]:
    """``memory_bytes`` and its bound; ``round_seconds``: what a round of so many rows takes. None: nobody by itself."""
    remembering = drafter if isinstance(drafter, RememberingDrafter) else None
    return {
        "memory_bytes": None if remembering is None else int(remembering.memory_bytes),
        "max_memory_bytes": None if remembering is None else int(remembering.max_memory_bytes),
        "round_seconds": (
            _points((rows, drafter.round_seconds(rows)) for rows in SHOWN_ROWS)
            if isinstance(drafter, CostlyDrafter)
            else None
        ),
    }


def drafter_memory(drafters: Mapping[str, Drafter]) -> dict[str, Callable[[], int]]:
    """How to read what each remembering drafter holds now."""
    return {
        name: partial(_memory_bytes, drafter)
        for name, drafter in drafters.items()
        if isinstance(drafter, RememberingDrafter)
    }


def _memory_bytes(drafter: RememberingDrafter) -> int:
    return int(drafter.memory_bytes)


def _points(points: Iterable[tuple[int, float]]) -> list[dict[str, float]]:
    return [{"rows": int(rows), "seconds": float(seconds)} for rows, seconds in points]
