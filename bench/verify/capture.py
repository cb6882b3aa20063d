"""Looking at one moment of a run: the step in which a sequence emits the token at a given output index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.offline import Completion, OfflineConfig, OfflineEngine, Speculate, Submission
from model.batch import PackedBatch
from model.interface import Executor, ForwardOutput, ReducedHead
from model.wrapped import WrappedExecutor
from specdec.plan import StepPlan, StepResult

Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a step."""

    seq_id: int
    num_computed: int  # before the step
    num_tokens: int  # known tokens that were run
    drafts: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The logits row that decided a token, and the whole step."""

    row: Row  # [V]
    batch: tuple[BatchItem, ...]


class Tap(WrappedExecutor):
    """An executor that keeps the batch and logits of its last whole forward."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.batch: PackedBatch | None = None
        self.logits: Row | None = None

    def forward(
        self,
        batch: PackedBatch,
        *,
        capture_layers: bool = False,
        num_layers: int | None = None,
        head: ReducedHead | None = None,
    ) -> ForwardOutput:
        output = super().forward(batch, capture_layers=capture_layers, num_layers=num_layers, head=head)
        if num_layers is None:  # else a draft of the first layers
            self.batch, self.logits = batch, output.logits.numpy()
        return output

    def drafts(self, item: int, num_tokens: int) -> tuple[int, ...]:
        """The drafts that the last forward verified for plan item ``item``, behind its ``num_tokens`` known tokens."""
        assert self.batch is not None
        first, end = int(self.batch.row_starts[item]) + num_tokens, int(self.batch.row_starts[item + 1])
        return tuple(self.batch.input_ids[first:end].tolist())


class RecordingEngine(OfflineEngine):
    """Keeps the moment in which sequence ``seq_id`` emits output index ``output_index``."""

    def __init__(
        self,
        executor: Executor,
        config: OfflineConfig,
        *,
        num_blocks: int,
        draft: Executor | None = None,
        speculate: Speculate | None = None,
        seq_id: int,
        output_index: int,
    ) -> None:
        self._tap = Tap(executor)
        super().__init__(self._tap, config, num_blocks=num_blocks, draft=draft, speculate=speculate)
        self._watched = seq_id, output_index
        self.moment: Moment | None = None

    def run_step(self, plan: StepPlan) -> StepResult:
        before = [(item.sequence.num_computed, item.sequence.num_output_tokens) for item in plan.items]
        result = super().run_step(plan)
        seq_id, wanted = self._watched
        for i, (item, output) in enumerate(zip(plan.items, result.outputs, strict=True)):
            at = wanted - before[i][1]
            if output.seq_id == seq_id and 0 <= at < len(output.token_ids):
                self.moment = Moment(
                    row=self._row(i, item.num_tokens - 1 + at),
                    batch=tuple(
                        BatchItem(
                            seq_id=each.sequence.seq_id,
                            num_computed=computed,
                            num_tokens=each.num_tokens,
                            drafts=self._tap.drafts(j, each.num_tokens),
                            accepted=found.num_accepted,
                        )
                        for j, (each, (computed, _), found) in enumerate(
                            zip(plan.items, before, result.outputs, strict=True)
                        )
                    ),
                )
        return result

    def _row(self, item: int, offset: int) -> Row:
        batch, logits = self._tap.batch, self._tap.logits
        assert batch is not None
        assert logits is not None
        packed = int(batch.row_starts[item]) + offset
        row: Row = logits[batch.logits_rows.tolist().index(packed)].copy()
        return row


def capture(
    executor: Executor,
    config: OfflineConfig,
    runs: Sequence[Sequence[Submission]],
    *,
    num_blocks: int,
    draft: Executor | None = None,
    speculate: Speculate | None = None,
    seq_id: int,
    output_index: int,
) -> tuple[Moment | None, list[list[Completion]]]:
    """Run ``runs`` one after the other in one engine; the moment (None: no such token) and the answers."""
    engine = RecordingEngine(
        executor,
        config,
        num_blocks=num_blocks,
        draft=draft,
        speculate=speculate,
        seq_id=seq_id,
        output_index=output_index,
    )
    answers = [engine.run(run) if run else [] for run in runs]
    return engine.moment, answers
