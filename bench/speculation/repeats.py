"""Outputs that go round in circles, which flatter every drafter."""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 8


def repeats_itself(token_ids: Sequence[int], length: int = GRAM) -> bool:
    """Does a run of ``length`` tokens occur twice in the output (overlapping runs count)?"""
    seen: set[tuple[int, ...]] = set()
    for first in range(len(token_ids) - length + 1):
        gram = tuple(token_ids[first : first + length])
        if gram in seen:
            return True
        seen.add(gram)
    return False


def repeating_share(outputs: Sequence[Sequence[int]], length: int = GRAM) -> float:
    """Share of the outputs that repeat themselves; 0 without outputs."""
    return sum(repeats_itself(output, length) for output in outputs) / len(outputs) if outputs else 0.0
