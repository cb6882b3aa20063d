"""What happened in a case, as opposed to what its values promise: counted at every step of its engine."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.offline import OfflineConfig, OfflineEngine
from bench.verify.factors import NO_DRAFTER
from model.interface import Executor
from specdec.drafters.base import Drafter, DraftRequest
from specdec.plan import StepPlan, StepResult
from specdec.sequence import Sequence


@dataclass(slots=True)
class Counts:
    """Of the compared requests, unless said otherwise."""

    drafted: int = 0
    accepted: int = 0
    drafted_positions: int = 0  # emitted by a step that verified a draft for the sequence
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
        drafter: Drafter,
        compared: Collection[int],
    ) -> None:
        self._heard = _Heard(drafter)
        super().__init__(executor, config, num_blocks=num_blocks, drafter=self._heard)
        self._compared = compared
        self._digest = hashlib.sha256()
        self.counts = Counts()

    def run_step(self, plan: StepPlan) -> StepResult:
        self._heard.drafts.clear()
        result = super().run_step(plan)
        counts, sequences = self.counts, 0
        for item, output in zip(plan.items, result.outputs, strict=True):
            drafts = self._heard.drafts.get(output.seq_id, [])
            self._digest.update(
                repr((output.seq_id, item.num_tokens, drafts, output.num_accepted, output.token_ids)).encode()
            )
            if output.seq_id in self._compared:
                sequences += 1
                counts.drafted += output.num_drafted
                counts.accepted += output.num_accepted
                counts.drafted_positions += len(output.token_ids) if output.num_drafted else 0
        self._digest.update(b"\n")
        counts.steps += 1
        counts.steps_of_2 += sequences >= 2
        counts.steps_of_8 += sequences >= 8
        counts.most_sequences = max(counts.most_sequences, sequences)
        counts.digest = self._digest.hexdigest()
        return result


class _Heard:
    """``inner``, whose proposals of the step are kept by seq_id."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.drafts: dict[int, list[int]] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        found = self._inner.propose(requests)
        self.drafts.update(zip((request.sequence.seq_id for request in requests), map(list, found), strict=True))
        return found

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        self._inner.update(sequence, num_emitted)

    def release(self, seq_id: int) -> None:
        self._inner.release(seq_id)
