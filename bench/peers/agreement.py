"""Outputs beside speeds: does a peer answer the same with speculation and without, alone and in a batch?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.serving.trace import Trace


@dataclass(frozen=True, slots=True)
class Output:
    """``ids`` are empty of a server that sends none; then texts are compared."""

    ids: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, trace: Trace) -> Output:
        return cls(tuple(trace.token_ids), trace.text)

    def same(self, other: Output) -> bool:
        return self.ids == other.ids if self.ids and other.ids else self.text == other.text


@dataclass(frozen=True, slots=True)
class Cell:
    workload: str
    seats: int


@dataclass(slots=True)
class Count:
    """``equal`` of ``compared`` outputs."""

    equal: int = 0
    compared: int = 0

    def add(self, equal: bool) -> None:
        self.equal += equal
        self.compared += 1

    def as_json(self) -> dict[str, int] | None:
        return {"equal": self.equal, "compared": self.compared} if self.compared else None


@dataclass(slots=True)
class Outputs:
    """The first whole output of every peer, speculation, cell and prompt, and how later ones of the same compare."""

    _first: dict[tuple[str, str, Cell], dict[int, Output]] = field(default_factory=dict)
    _again: dict[tuple[str, str, Cell], Count] = field(default_factory=dict)

    def take(self, peer: str, speculation: str, cell: Cell, prompts: Sequence[int], traces: Sequence[Trace]) -> None:
        """``prompts`` numbers the prompt of each trace."""
        key = (peer, speculation, cell)
        known, again = self._first.setdefault(key, {}), self._again.setdefault(key, Count())
        for prompt, trace in zip(prompts, traces, strict=True):
            if not trace.ok:
                continue
            output = Output.of(trace)
            if prompt in known:
                again.add(output.same(known[prompt]))
            else:
                known[prompt] = output

    def again(self, peer: str, speculation: str, cell: Cell) -> Count:
        """A prompt's later outputs in the same cell, against its first one."""
        return self._again.get((peer, speculation, cell), Count())

    def with_speculation(self, peer: str, speculation: str, cell: Cell) -> Count:
        """Against the outputs without speculation in the same cell."""
        return self._between((peer, speculation, cell), (peer, "off", cell))

    def in_a_batch(self, peer: str, speculation: str, cell: Cell, fewest: int) -> Count:
        """Without and with: against the outputs of the same speculation with ``fewest`` requests at a time."""
        return self._between((peer, speculation, cell), (peer, speculation, Cell(cell.workload, fewest)))

    def common_start(self, peer: str, other: str, cell: Cell) -> float | None:
        """How many tokens of two peers' plain outputs are the same before the first difference: the median over the
        prompts. A whole output counts as its length. Of peers without ids None. Few of them mean other weights or
        another prompt, not another rounding."""
        mine, theirs = self._first.get((peer, "off", cell), {}), self._first.get((other, "off", cell), {})
        lengths = [
            _common(mine[prompt].ids, theirs[prompt].ids)
            for prompt in mine.keys() & theirs.keys()
            if mine[prompt].ids and theirs[prompt].ids
        ]
        return statistics.median(lengths) if lengths else None

    def _between(self, one: tuple[str, str, Cell], other: tuple[str, str, Cell]) -> Count:
        count = Count()
        if one == other:
            return count
        mine, theirs = self._first.get(one, {}), self._first.get(other, {})
        for prompt in mine.keys() & theirs.keys():
            count.add(mine[prompt].same(theirs[prompt]))
        return count


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
