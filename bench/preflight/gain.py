"""What speculation is expected to gain: tokens a step against what the step costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.preflight.acceptance import Replay
from bench.preflight.cost import Range, StepCost


@dataclass(frozen=True, slots=True)
class Gain:
    """Expected tokens/s with speculation / without, of the decode steps, at a batch size."""

    drafter: str
    batch: int
    k: int
    expected: float
    bound: float  # if every draft were accepted
    controlled: bool = False  # the controller picks the draft length, at most ``k``


def expected_gain(replay: Replay, cost: StepCost, batch: float) -> Range:
    """tokens a step x t(B, 0) / t(B, drafted a step). Steps without a draft cost and yield what plain ones do.

    The time of a step is linear between the measured numbers of drafts, so the mean draft stands for the mix.
    """
    tokens, slower = replay.tokens_per_step, cost.slowdown(batch, replay.drafted_per_step)
    return Range(tokens / slower.median, tokens / slower.high, tokens / slower.low)


def gains(replays: Sequence[Replay], cost: StepCost) -> list[Gain]:
    """For every drafter, draft length and measured batch size; where the batch matters, for the nearest one."""
    return [
        Gain(
            one.drafter,
            batch,
            one.k,
            expected_gain(one, cost, batch).median,
            cost.bound(batch, one.k),
            one.batch is not None,
        )
        for one in replays
        for batch in cost.batches
        if one.batch is None or batch == cost.nearest(one.batch)
    ]


def best_replay(replays: Sequence[Replay], cost: StepCost, batch: float) -> Replay | None:
    """Whichever is expected to gain most at ``batch``."""
    return max(replays, key=lambda one: expected_gain(one, cost, batch).median, default=None)
