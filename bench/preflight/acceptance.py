"""Acceptance of a drafter on outputs that are known: the accept rule of the step, without the model.

At L0 the emitted tokens do not depend on the drafts, so what a drafter would have had accepted can be read off a
recorded output: a draft token is accepted if it and all before it equal the output's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kvcache.table import BlockTable
from specdec.drafters.base import Drafter, DraftRequest
from specdec.params import SamplingParams
from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Replay:
    """What one drafter, or ``auto``, with at most ``k`` drafts a step did on some outputs. Positions count from 0."""

    drafter: str
    k: int
    num_requests: int
    steps: int  # of decoding, with or without a draft
    emitted: int  # tokens of these steps
    drafts: int  # steps that had one
    drafted: int
    accepted: int
    offered_at: tuple[int, ...]  # [i]: drafts of more than i tokens
    accepted_at: tuple[int, ...]  # [i]: of these, accepted up to and with token i
    batch: int | None = None  # so many sequences ran together; None: that makes no difference

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Over all steps, those without a draft among them: what a step's cost has to be divided by."""
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps if self.steps else 0.0

    @property
    def rate_at(self) -> tuple[float | None, ...]:
        """By position: accepted / offered."""
        return tuple(a / o if o else None for a, o in zip(self.accepted_at, self.offered_at, strict=True))


@dataclass(slots=True)
class Tally:
    """Counts of a replay while it runs."""

    k: int
    num_requests: int = 0
    steps: int = 0
    emitted: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    offered_at: list[int] = field(init=False)
    accepted_at: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.offered_at, self.accepted_at = [0] * self.k, [0] * self.k

    def count(self, draft: Seq[int], left: Seq[int]) -> int:
        """A decode step verified ``draft`` where ``left`` was to come. Returns how much of it is accepted."""
        matched = 0
        while matched < len(draft) and draft[matched] == left[matched]:
            matched += 1
        for i in range(len(draft)):
            self.offered_at[i] += 1
            self.accepted_at[i] += i < matched
        self.steps += 1
        self.emitted += matched + 1
        self.drafts += bool(draft)
        self.drafted += len(draft)
        self.accepted += matched
        return matched

    def replay(self, drafter: str, batch: int | None = None) -> Replay:
        return Replay(
            drafter,
            self.k,
            self.num_requests,
            self.steps,
            self.emitted,
            self.drafts,
            self.drafted,
            self.accepted,
            tuple(self.offered_at),
            tuple(self.accepted_at),
            batch,
        )


def replay(drafter: Drafter, outputs: Seq[tuple[Seq[int], Seq[int]]], k: int) -> Replay:
    """Draft along each (prompt, output) in ids. The first output token comes from the prefill, without a draft."""
    tally = Tally(k)
    for seq_id, (prompt, output) in enumerate(outputs):
        tally.num_requests += 1
        sequence = Sequence(seq_id, list(prompt), SamplingParams(seed=0), BlockTable(1))
        sequence.tokens.extend(output[:1])
        while (done := sequence.num_output_tokens) < len(output):
            left = output[done:]
            limit = min(k, len(left) - 1)
            draft = drafter.propose([DraftRequest(sequence, limit)])[0][:limit] if limit > 0 else []
            matched = tally.count(draft, left)
            sequence.tokens.extend(left[: matched + 1])
            drafter.update(sequence, matched + 1)
        drafter.release(seq_id)
    return tally.replay(drafter.name)
