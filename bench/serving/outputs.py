"""The outputs of every mode for the same request, held against the first one."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from bench.serving.trace import Trace

MAX_KEPT = 50  # differences that a report shows
SHOWN = 8  # tokens, or characters times 4, around the first difference


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """Where an output left the reference. ``expected`` and ``got`` begin at the difference."""

    where: str  # the run, for people
    prompt: str
    unit: str  # "token" or "character"
    index: int
    expected: str
    got: str
    reference: str  # the run that gave the reference

    def __str__(self) -> str:
        return (
            f"{self.where}, {self.prompt}: from output {self.unit} {self.index} on {self.got}, "
            f"of {self.reference} {self.expected}"
        )


@dataclass(slots=True)
class Tally:
    """Of one cell and mode. ``by`` is what was compared: token ids, or texts where a server sends no ids."""

    compared: int = 0
    different: int = 0
    unfinished: int = 0  # requests without a whole output
    by: str = ""


@dataclass(slots=True)
class _Reference:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    where: str


@dataclass(slots=True)
class Agreement:
    """The reference of a request is the first whole output that it got, in whatever mode and round.

    An output is its token ids, where both have them, else its text; and why it ended.
    """

    differences: list[OutputDifference] = field(default_factory=list)
    compared: int = 0
    different: int = 0
    _known: dict[Hashable, _Reference] = field(default_factory=dict)

    def check(self, key: Hashable, trace: Trace, where: str, tally: Tally) -> None:
        """``key`` names the request, and whose outputs have to be alike."""
        if not trace.ok:
            tally.unfinished += 1
            return
        reference = self._known.get(key)
        if reference is None:
            self._known[key] = _Reference(tuple(trace.token_ids), trace.text, trace.finish_reason, where)
            tally.by = tally.by or ("token ids" if trace.token_ids else "texts")
            return
        by_ids = bool(reference.token_ids and trace.token_ids)
        tally.by = "token ids" if by_ids else "texts"
        tally.compared += 1
        self.compared += 1
        same = tuple(trace.token_ids) == reference.token_ids if by_ids else trace.text == reference.text
        if same and trace.finish_reason == reference.finish_reason:
            return
        tally.different += 1
        self.different += 1
        if len(self.differences) < MAX_KEPT:
            self.differences.append(_difference(reference, trace, where, by_ids, same))


def _difference(reference: _Reference, trace: Trace, where: str, by_ids: bool, same: bool) -> OutputDifference:
    if same:
        expected, got = f"the end was {reference.finish_reason}", f"the end was {trace.finish_reason}"
        index = len(trace.token_ids) if by_ids else len(trace.text)
        return OutputDifference(
            where, trace.prompt, "token" if by_ids else "character", index, expected, got, reference.where
        )
    if by_ids:
        index = _first_difference(reference.token_ids, tuple(trace.token_ids))
        expected = str(list(reference.token_ids[index : index + SHOWN]))
        got = str(trace.token_ids[index : index + SHOWN])
        return OutputDifference(where, trace.prompt, "token", index, expected, got, reference.where)
    index = _first_difference(tuple(reference.text), tuple(trace.text))
    window = slice(index, index + 4 * SHOWN)
    return OutputDifference(
        where, trace.prompt, "character", index, repr(reference.text[window]), repr(trace.text[window]), reference.where
    )


def _first_difference(a: tuple[object, ...], b: tuple[object, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
