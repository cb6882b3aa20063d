"""What happened in a case, as opposed to what its values promise: counted at every step of its engine."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from bench.offline import OfflineConfig, OfflineEngine, Speculate
from bench.verify.capture import Tap
from bench.verify.factors import NO_DRAFTER
from model.interface import Executor
from specdec.plan import StepPlan, StepResult


@dataclass(slots=True)
class Counts:
    """Of the compared requests, unless said otherwise."""

    drafted: int = 0
    accepted: int = 0
    drafted_by: Counter[str] = field(default_factory=Counter)  # drafted, by drafter
    drafted_positions: int = 0  # emitted by a step that verified a draft of the case's drafter for the sequence
    steps: int = 0  # of any request
    steps_of_2: int = 0  # steps with at least 2 sequences
    steps_of_8: int = 0
    most_sequences: int = 0  # in one step
    preemptions: int = 0  # of any request
    cached_tokens: int = 0  # of prompts, found in the prefix cache at admission
    aborted: int = 0  # requests that an abort ended before they were done
    digest: str = ""  # of every step's batch, drafts, accepted and emitted tokens: equal if two runs did the same


def lacking(values: Mapping[str, str], counts: Counts) -> dict[str, str]:
    """The factors whose value did not come about in a case, with the reason."""
    found: dict[str, str] = {}
    if counts.most_sequences < int(values["batch"]):
        found["batch"] = "no step had so many sequences"
    if not counts.drafted_positions and values["drafter"] != NO_DRAFTER:
        found["drafter"] = found["k"] = "nothing was drafted"
    if values["condition"] != "none" and not counts.preemptions:
        found["condition"] = "nothing was preempted"
    if values["cache"] in ("warm", "follow-up") and not counts.cached_tokens:
        found["cache"] = "no cached token was used"
    if values["aborts"] == "yes" and not counts.aborted:
        found["aborts"] = "nothing was aborted before it ended"
    return found


class CountingEngine(OfflineEngine):
    """``compared`` are the seq_ids of the requests that count."""

    def __init__(
        self,
        executor: Executor,
        config: OfflineConfig,
        *,
        num_blocks: int,
        draft: Executor | None,
        speculate: Speculate,
        compared: Collection[int],
    ) -> None:
        self._tap = Tap(executor)
        super().__init__(self._tap, config, num_blocks=num_blocks, draft=draft, speculate=speculate)
        self._compared = compared
        self._digest = hashlib.sha256()
        self.counts = Counts()

    def run_step(self, plan: StepPlan) -> StepResult:
        result = super().run_step(plan)
        counts, sequences = self.counts, 0
        for i, (item, output) in enumerate(zip(plan.items, result.outputs, strict=True)):
            drafts = self._tap.drafts(i, item.num_tokens)
            self._digest.update(
                repr(
                    (output.seq_id, item.num_tokens, output.drafter, drafts, output.num_accepted, output.token_ids)
                ).encode()
            )
            if output.seq_id in self._compared:
                sequences += 1
                counts.drafted += output.num_drafted
                counts.accepted += output.num_accepted
                if output.num_drafted:
                    counts.drafted_by[output.drafter] += output.num_drafted
                    # A request that names its own drafter says nothing of the case's.
                    if item.sequence.params.drafter is None:
                        counts.drafted_positions += len(output.token_ids)
        self._digest.update(b"\n")
        counts.steps += 1
        counts.steps_of_2 += sequences >= 2
        counts.steps_of_8 += sequences >= 8
        counts.most_sequences = max(counts.most_sequences, sequences)
        counts.digest = self._digest.hexdigest()
        return result
