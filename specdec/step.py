"""The speculative step: draft, verify in one packed forward, accept, roll back, sync.

::

    tokens      t0 .. t_c .. t_n-1           c = num_computed, n = len(tokens)
    rows             t_c .. t_n-1  d0 .. d_k-1
    slots            c      n-1    n     n+k-1
    emitted                        x0 .. x_m-1       1 <= m <= k + 1, the target's own tokens
    afterwards  tokens = t0 .. t_n-1 x0 .. x_m-1,  num_computed = n + m - 1

Rolling back is arithmetic: num_computed is set and whole surplus blocks go back. No tensor is touched: a rejected
draft's slot holds a position that num_computed does not cover, and the next step writes that position again
before anything reads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvcache.ledger import Ledger
from kvcache.manager import KVCacheManager
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from specdec.constraint import TokenConstraint
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.lengths import Choice
from specdec.drafters.base import Drafter
from specdec.drafting import Drafting
from specdec.errors import ErrorType, SamplingError
from specdec.ledger_hook import check_forward, settle, watch
from specdec.logprobs import token_logprobs
from specdec.plan import STAGES, PlanItem, SequenceOutput, StepPlan, StepResult, StepStats, TokenLogprobs
from specdec.proposing import Proposing, Wish
from specdec.rival import rival_gap
from specdec.sampling import RowJob, Sampler, SamplingState
from specdec.sequence import Sequence
from specdec.verification import Verdict, verify

Rows = NDArray[np.float32]  # [R, V]: the logits without a copy

logger = logging.getLogger(__name__)

# Nothing in a step copies KV: acceptance of any length only changes num_computed. A design that has to realign its
# cache would count the bytes here.
BLOCKS_MOVED = 0
ALIGNMENT_BYTES_MOVED = 0


@dataclass(slots=True)
class _Work:
    """One plan item on its way through the step."""

    item: PlanItem
    tokens_left: int  # how many tokens may be emitted; 0 if the item does not sample
    drafts: list[int]
    drafter: str = ""
    first_row: int = 0  # of its logits rows
    num_scored: int = 0  # leading logits rows that give prompt logprobs
    sample_row: int = 0  # logits row of the last known token
    verdict: Verdict | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    rival_gap: float | None = None
    error: str | None = None
    error_type: ErrorType = "server"

    @property
    def sequence(self) -> Sequence:
        return self.item.sequence


class SpeculativeStep:
    """Runs step plans. One thread at a time may call it; it owns the sampling state of the sequences it has seen.

    ``storage`` must be bound to ``executor``; ``manager`` owns the blocks of every table in a plan. ``default_k`` is
    the draft length of sequences that ask for none (None: whatever the plan allows). ``max_model_len`` defaults to the
    model's. ``controller`` picks drafters and draft lengths; without one, all that a sequence's drafter proposes is
    verified. The name "auto" stands for the drafters of ``auto`` (None: all) and needs the controller. ``ledger``, if
    given, is also the manager's observer; it checks every forward. Raises ValueError for a default that nobody is.
    """

    def __init__(
        self,
        executor: Executor,
        manager: KVCacheManager,
        storage: KVStorage,
        *,
        drafters: Mapping[str, Drafter],
        default_drafter: str | None,
        default_k: int | None = None,
        sampler: Sampler | None = None,
        constraint: TokenConstraint | None = None,
        max_model_len: int | None = None,
        controller: DraftLengthController | None = None,
        auto: Container[str] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if default_k is not None and default_k < 0:
            raise ValueError(f"the draft length is not negative, got {default_k}")
        info = executor.info
        self._executor = executor
        self._manager = manager
        self._storage = storage
        self._vocab_size = info.num_token_ids
        self._drafting = Drafting(drafters, default_drafter, self._vocab_size, auto, constraint)
        self._proposing = Proposing(self._drafting, default_drafter, controller)
        self._default_k = default_k
        self._sampler = sampler if sampler is not None else Sampler()
        self._constraint = constraint
        self._max_model_len = info.max_model_len if max_model_len is None else max_model_len
        self._states: dict[int, SamplingState] = {}
        # If the last ``run`` raised: whether it left every sequence and table as they were, so that it may run again.
        self.intact = True
        self._ledger = ledger
        if ledger is not None:
            watch(ledger, drafters.values())

    @property
    def num_drafter_failures(self) -> int:
        """Calls to drafters that raised, since the start."""
        return self._drafting.num_failures

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step. Mutates the plan's sequences (``tokens``, ``num_computed``) and tables; see StepResult.

        A sequence that cannot be sampled gets an ``error`` and keeps its state. An exception of the executor, or a
        plan that leaves its block tables, is raised and leaves every sequence as it was. So is a LedgerError, but for
        one about the step's own commits, which comes last. ``intact`` tells which it was.
        """
        if not plan.items:
            return StepResult((), StepStats())
        self.intact = True
        marks = [time.perf_counter()]
        work, expected = self._draft(plan)
        marks.append(time.perf_counter())
        batch = self._build(work)
        if self._ledger is not None:
            check_forward(self._ledger, batch, [(one.sequence, one.drafts) for one in work])
        marks.append(time.perf_counter())
        forward = self._executor.forward(batch)
        logits = forward.logits
        if logits.shape[1] > self._vocab_size:
            logits = logits[:, : self._vocab_size].contiguous()
        marks.append(time.perf_counter())
        self._accept(work, logits)
        marks.append(time.perf_counter())
        self.intact = False
        try:
            outputs = tuple(self._apply(one) for one in work)
        finally:
            if self._ledger is not None:
                settle(self._ledger, [one.sequence for one in work])
        marks.append(time.perf_counter())
        self._sync(work)
        marks.append(time.perf_counter())
        seconds = {stage: end - start for stage, start, end in zip(STAGES, marks[:-1], marks[1:], strict=True)}
        self._proposing.observe(
            {output.seq_id: output.token_ids for output in outputs},
            rows=batch.num_rows,
            seconds=marks[-1] - marks[1],
            drafting=marks[1] - marks[0],
        )
        parts = {**batch.build_seconds, "mask": forward.mask_seconds}
        return StepResult(outputs, _statistics(outputs, batch.num_rows, seconds, parts, expected))

    def check(self) -> None:
        """Run a forward of one row that belongs to nobody. Raises what the executor raises."""
        scratch, size = self._storage.scratch_block, self._storage.block_size
        span = RowSpan([0], 0, [scratch], logits_from=0)
        self._executor.forward(PackedBatch.build([span], block_size=size, scratch_block=scratch))

    def release(self, seq_id: int) -> None:
        """Forget a sequence that has ended or will start over; unknown ids are fine."""
        self._states.pop(seq_id, None)
        self._drafting.release(seq_id)
        self._proposing.release(seq_id)
        if self._constraint is not None:
            self._constraint.release(seq_id)

    def _draft(self, plan: StepPlan) -> tuple[list[_Work], Choice | None]:
        work = [_Work(item, self._tokens_left(item), []) for item in plan.items]
        asking = [(one, limit) for one in work if (limit := self._draft_limit(one)) > 0]
        drafts, expected = self._proposing.drafts(
            [Wish(one.sequence, limit) for one, limit in asking],
            rows=sum(item.num_tokens for item in plan.items),
            tokens=sum(one.tokens_left > 0 for one in work),
        )
        for (one, _), draft in zip(asking, drafts, strict=True):
            one.drafts = list(draft.token_ids)
            one.drafter = draft.drafter if draft.token_ids else ""
        return work, expected

    def _tokens_left(self, item: PlanItem) -> int:
        if not item.samples:
            return 0
        sequence = item.sequence
        return max(
            0,
            min(
                sequence.params.max_tokens - sequence.num_output_tokens,
                self._max_model_len - len(sequence.tokens),
            ),
        )

    def _draft_limit(self, one: _Work) -> int:
        limit = min(one.item.max_drafts, one.tokens_left - 1)
        asked = one.sequence.params.num_speculative_tokens
        wished = self._default_k if asked is None else asked
        return limit if wished is None else min(limit, wished)

    def _build(self, work: list[_Work]) -> PackedBatch:
        spans = []
        next_row = 0
        for one in work:
            sequence, count = one.sequence, one.item.num_tokens
            start = sequence.num_computed
            if sequence.params.prompt_logprobs is not None:
                # Row p scores prompt token p + 1.
                one.num_scored = max(0, min(start + count, sequence.num_prompt_tokens - 1) - start)
            first_wanted = count - 1 if one.tokens_left else count + len(one.drafts)
            logits_from = 0 if one.num_scored else first_wanted
            one.first_row = next_row
            one.sample_row = next_row + count - 1 - logits_from
            next_row += count + len(one.drafts) - logits_from
            ids = sequence.tokens[start : start + count]
            ids.extend(one.drafts)
            spans.append(RowSpan(ids, start, sequence.table.blocks, logits_from))
        return PackedBatch.build(spans, block_size=self._storage.block_size, scratch_block=self._storage.scratch_block)

    def _accept(self, work: list[_Work], logits: Tensor) -> None:
        tokens = self._sample_batch([one for one in work if one.tokens_left and self._batchable(one.sequence)], logits)
        rows = logits.numpy()
        for one in work:
            if one.error is not None:
                continue
            try:
                self._accept_one(one, logits, rows, tokens)
            except SamplingError as error:
                one.error, one.error_type = str(error), error.error_type
            except Exception as error:
                logger.exception("sampling sequence %d failed", one.sequence.seq_id)
                one.error = f"internal error while sampling ({type(error).__name__})"
            if one.error is not None:
                self._states.pop(one.sequence.seq_id, None)  # it may have seen drafts; it can be derived again

    def _sample_batch(self, work: list[_Work], logits: Tensor) -> dict[int, int]:
        """Token by row. If that fails, each by itself, which gives the same tokens: who fails then has an error."""
        jobs = [
            RowJob(one.sample_row, len(one.drafts) + 1, one.sequence.params, one.sequence.num_output_tokens)
            for one in work
        ]
        try:
            return self._sampler.sample_batch(logits, jobs)
        except Exception:
            logger.exception("sampling %d sequences at once failed; each is sampled by itself", len(jobs))
        tokens: dict[int, int] = {}
        for one, job in zip(work, jobs, strict=True):
            try:
                tokens.update(self._sampler.sample_batch(logits, [job]))
            except Exception as error:
                logger.exception("sampling sequence %d failed", one.sequence.seq_id)
                one.error = f"internal error while sampling ({type(error).__name__})"
        return tokens

    def _batchable(self, sequence: Sequence) -> bool:
        return self._sampler.batchable(sequence.params) and not self._constrained(sequence)

    def _constrained(self, sequence: Sequence) -> bool:
        return self._constraint is not None and self._constraint.applies(sequence)

    def _accept_one(self, one: _Work, logits: Tensor, rows: Rows, tokens: dict[int, int]) -> None:
        sequence, params = one.sequence, one.sequence.params
        if one.num_scored:
            assert params.prompt_logprobs is not None
            first = sequence.num_computed + 1
            ids = sequence.tokens[first : first + one.num_scored]
            one.prompt_logprobs = self._score(logits, rows, one.first_row, ids, params.prompt_logprobs)
        if not one.item.samples:
            return
        target = self._target(one, rows, tokens) if one.tokens_left else _no_target
        one.verdict = verify(one.drafts, target, stop_token_ids=params.stop_token_ids, tokens_left=one.tokens_left)
        if params.logprobs is not None:
            one.logprobs = self._score(logits, rows, one.sample_row, one.verdict.token_ids, params.logprobs)
        rival, emitted = one.item.rival, one.verdict.token_ids
        if rival is not None and not one.drafts and emitted and emitted[0] != rival:
            constrained = self._constrained(sequence)
            mask = self._constraint.mask(sequence, ()) if self._constraint and constrained else None
            state = self._state(sequence) if constrained or not params.plain else None
            row = rows[one.sample_row]
            one.rival_gap = rival_gap(row, params, sequence.num_output_tokens, emitted[0], rival, state, mask)

    def _target(self, one: _Work, rows: Rows, tokens: dict[int, int]) -> Callable[[int], int]:
        """The target's token by row, sampled only when asked for, unless a batch call has sampled it already."""
        sequence, params, first = one.sequence, one.sequence.params, one.sample_row
        t = sequence.num_output_tokens
        constrained = self._constrained(sequence)
        if params.grammar is not None and not constrained:
            raise SamplingError("structured output is not available for this model")
        if params.plain and not constrained:

            def plain(i: int) -> int:
                token = tokens.get(first + i, -1)
                return token if token >= 0 else self._sampler.sample_row(rows[first + i], params, t + i)

            return plain

        state = self._state(sequence)
        drafts = one.drafts

        def stateful(i: int) -> int:
            if i > 0:
                state.history.push(drafts[i - 1])  # accepted, or this row would not matter
            mask = self._constraint.mask(sequence, drafts[:i]) if self._constraint and constrained else None
            return self._sampler.sample_row(rows[first + i], params, t + i, state, mask)

        return stateful

    def _state(self, sequence: Sequence) -> SamplingState:
        state = self._states.get(sequence.seq_id)
        if state is None:
            state = SamplingState(sequence.params, sequence.tokens, sequence.num_prompt_tokens, self._vocab_size)
            self._states[sequence.seq_id] = state
        else:
            state.history.sync(sequence.tokens)
        return state

    def _score(self, logits: Tensor, rows: Rows, first: int, ids: Seq[int], top: int) -> tuple[TokenLogprobs, ...]:
        normalisers = self._sampler.normalisers(logits, first, len(ids))
        return tuple(
            token_logprobs(rows[first + i], token, top, normaliser)
            for i, (token, normaliser) in enumerate(zip(ids, normalisers, strict=True))
        )

    def _apply(self, one: _Work) -> SequenceOutput:
        """Commit what is verified and roll back the rest."""
        sequence, count = one.sequence, one.item.num_tokens
        if one.error is not None:
            return SequenceOutput(sequence.seq_id, error=one.error, error_type=one.error_type)
        scored_from = sequence.num_computed + 1
        written = sequence.num_computed + count  # known tokens whose KV exists now
        verdict = one.verdict
        trimmed = 0
        if verdict is None:
            sequence.num_computed = written
            self._manager.commit(sequence.table, sequence.tokens, written)
        else:
            sequence.tokens.extend(verdict.token_ids)
            sequence.num_computed = len(sequence.tokens) - 1
            # The last token's slot stays: the next step writes it.
            self._manager.commit(sequence.table, sequence.tokens, max(written, sequence.num_computed))
            trimmed = self._manager.truncate(sequence.table, len(sequence.tokens))
            state = self._states.get(sequence.seq_id)
            if state is not None:
                state.history.sync(sequence.tokens)
        return SequenceOutput(
            sequence.seq_id,
            token_ids=verdict.token_ids if verdict else (),
            logprobs=one.logprobs,
            prompt_logprobs=one.prompt_logprobs,
            prompt_start=scored_from if one.prompt_logprobs is not None else 0,
            num_drafted=len(one.drafts),
            num_accepted=verdict.num_accepted if verdict else 0,
            drafter=one.drafter,
            draft_token_ids=tuple(one.drafts) if sequence.params.trace_drafts else None,
            finish_reason=verdict.finish_reason if verdict else None,
            stop_token_id=verdict.stop_token_id if verdict else None,
            blocks_trimmed=trimmed,
            rival_gap=one.rival_gap,
        )

    def _sync(self, work: list[_Work]) -> None:
        for one in work:
            if one.error is None and one.verdict is not None and one.verdict.token_ids:
                self._drafting.update(one.sequence, len(one.verdict.token_ids))


def _no_target(row: int) -> int:
    raise AssertionError(f"row {row} was sampled although no token is left")


def _statistics(
    outputs: tuple[SequenceOutput, ...],
    num_rows: int,
    seconds: dict[str, float],
    build_seconds: dict[str, float],
    expected: Choice | None,
) -> StepStats:
    drafted = sum(output.num_drafted for output in outputs)
    accepted = sum(output.num_accepted for output in outputs)
    return StepStats(
        num_rows=num_rows,
        num_sequences=len(outputs),
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=sum(len(output.token_ids) for output in outputs),
        rollback_tokens=drafted - accepted,
        blocks_trimmed=sum(output.blocks_trimmed for output in outputs),
        blocks_moved=BLOCKS_MOVED,
        alignment_bytes_moved=ALIGNMENT_BYTES_MOVED,
        stage_seconds=seconds,
        expected_tokens=None if expected is None else expected.tokens,
        expected_seconds=None if expected is None else expected.seconds,
        expected_speedup=None if expected is None else expected.speedup,
        build_seconds=build_seconds,
    )
