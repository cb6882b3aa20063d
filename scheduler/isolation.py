"""The results of a step that was run again sequence by sequence, to find who makes it raise, as one result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specdec.plan import StepResult, StepStats


def joined(parts: Sequence[StepResult]) -> StepResult:
    """One result for the plan whose items ``parts`` ran, in order. What a controller expected of it is not told."""
    stats = [part.stats for part in parts]
    return StepResult(
        tuple(output for part in parts for output in part.outputs),
        StepStats(
            num_rows=sum(one.num_rows for one in stats),
            num_sequences=sum(one.num_sequences for one in stats),
            num_drafted=sum(one.num_drafted for one in stats),
            num_accepted=sum(one.num_accepted for one in stats),
            num_emitted=sum(one.num_emitted for one in stats),
            rollback_tokens=sum(one.rollback_tokens for one in stats),
            blocks_trimmed=sum(one.blocks_trimmed for one in stats),
            blocks_moved=sum(one.blocks_moved for one in stats),
            alignment_bytes_moved=sum(one.alignment_bytes_moved for one in stats),
            stage_seconds=_added(one.stage_seconds for one in stats),
            build_seconds=_added(one.build_seconds for one in stats),
        ),
    )


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds
