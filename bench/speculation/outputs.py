"""Every output of every run, held against the first one without speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Key = tuple[str, float, int]  # workload, temperature, prompt


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run's output left that of plain decoding."""

    where: str  # the run, for people
    prompt: str
    output_index: int
    expected: int | None  # None: the output was shorter
    got: int | None

    def __str__(self) -> str:
        return (
            f"{self.where}, prompt {self.prompt}: output token {self.output_index} is {self.got}, "
            f"without speculation it is {self.expected}"
        )


class Outputs:
    """The reference of a prompt is its first output without speculation; it must not depend on batch mates either."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[int, ...]] = {}
        self.num_compared = 0
        self.differences: list[Difference] = []

    def learn(self, key: Key, token_ids: Sequence[int]) -> None:
        """An output without speculation; the first one of its key is the reference."""
        self._known.setdefault(key, tuple(token_ids))

    def check(self, key: Key, token_ids: Sequence[int], *, where: str, prompt: str) -> None:
        """Compare, and keep the first difference. Raises KeyError if there is no reference yet."""
        expected, got = self._known[key], tuple(token_ids)
        self.num_compared += 1
        if expected == got:
            return
        index = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got))
        )
        self.differences.append(
            Difference(where, prompt, index, _at(expected, index), _at(got, index)),
        )

    def of(self, workload: str, temperature: float) -> list[tuple[int, ...]]:
        """The references of one workload."""
        return [ids for (name, degree, _), ids in self._known.items() if (name, degree) == (workload, temperature)]


def _at(ids: Sequence[int], index: int) -> int | None:
    return ids[index] if index < len(ids) else None
