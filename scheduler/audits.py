"""Audits beside the live requests: which choices, in which rows, and what came of them.

Nothing here can change what a live request gets, or when in terms of steps: audits run in private blocks, in rows that
the live plan left over, and hold no seat. What they cost is the time of their rows.

::

    offer -> waiting -> running -> finding
               |  full, too large: dropped
               |  shutdown, failed step, fault: dropped, as is all that comes when audits are off

Whatever happens, the results add up to the chosen choices that ended by themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcache.manager import KVCacheManager
from scheduler.audit import AUDIT_RESULTS, AuditCase, AuditConfig, AuditFinding, AuditStatus, Trail
from scheduler.choice import Choice
from scheduler.request import ChoiceEvent, TextFilterFactory
from scheduler.rerun import Rerun, plain_params
from specdec.plan import PlanItem, SequenceOutput
from specdec.sequence import Sequence as DecodedSequence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    rerun: Rerun
    sequence: DecodedSequence
    num_blocks: int  # that it needs at its longest; set aside from the start, so it never runs out
    size: int  # of its case


class Audits:
    """Belongs to a scheduler, which calls it in the order of its own steps. A fault in here switches audits off."""

    def __init__(
        self,
        config: AuditConfig,
        manager: KVCacheManager,
        text_filters: TextFilterFactory,
        *,
        token_budget: int,
        next_seq_id: Callable[[], int],
    ) -> None:
        self.config = config
        self.num_rows = 0  # since the start
        self.findings: list[AuditFinding] = []  # since they were taken
        self.released: list[int] = []  # sequences that the step must forget
        self._manager = manager
        self._text_filters = text_filters
        self._next_seq_id = next_seq_id
        self._most_rows = max(1, int(config.row_share * token_budget))
        self._credit = 0.0  # rows that audits may still take beside live ones
        self._waiting: deque[tuple[AuditCase, int]] = deque()  # with their sizes
        self._running: dict[int, _Running] = {}  # by seq_id, in the order of admission
        self._waiting_tokens = 0  # of both
        self._doomed: list[DecodedSequence] = []  # ended, but the step that runs still has them
        self._in_flight = False
        self._off: str | None = None  # why audits are off
        self._failed_steps = 0  # in a row, for which audits are to blame
        self._results: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    @property
    def enabled(self) -> bool:
        return self._off is None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def status(self) -> AuditStatus:
        return AuditStatus(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            waiting_tokens=self._waiting_tokens,
            num_rows=self.num_rows,
            results={result: self._results[result] for result in AUDIT_RESULTS},
            dropped=dict(self._dropped),
            enabled=self.enabled,
        )

    def chosen(self, request_id: str, index: int) -> bool:
        """Whether this choice will be audited: decided by a hash of its name, so a repetition decides alike."""
        chosen = False
        with self._guard():
            digest = hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=8).digest()
            chosen = int.from_bytes(digest) < self.config.rate * 2**64
        return chosen

    def follow(self, choice: Choice, event: ChoiceEvent) -> None:
        """Take note of an event of a chosen choice; its last one makes it an audit."""
        trail = choice.trail
        if trail is None:
            return
        ended, size = event.finish_reason is not None, 0
        case: AuditCase | None = None
        if self.enabled:
            with self._guard():
                trail.logprobs.extend(event.logprobs or ())
                trail.prompt_logprobs = event.prompt_logprobs or trail.prompt_logprobs
                case = _case(choice, event, trail) if ended else None
        if not ended:
            return
        choice.trail = None
        reason: str | None = self._off or "fault"
        if case is not None and self.enabled:
            with self._guard():
                size = case.size
                reason = self._refusal(case, size)
        if reason is not None:
            self._drop(event.request_id, event.index, reason)
        elif case is not None:
            self._waiting.append((case, size))
            self._waiting_tokens += size

    def plan(self, rows_left: int, live_rows: int) -> list[PlanItem]:
        """Rows for audits, out of ``rows_left`` that a plan with ``live_rows`` left over."""
        items: list[PlanItem] = []
        with self._guard():
            items = self._plan(rows_left, live_rows)
        if not self.enabled:
            items = []
        self._in_flight = bool(items) or live_rows > 0
        return items

    def apply(self, item: PlanItem, output: SequenceOutput) -> None:
        """What the step did to a planned audit; one that was dropped meanwhile is passed over."""
        running = self._running.get(item.sequence.seq_id)
        if running is None:
            return
        with self._guard():
            finding = running.rerun.take(output)
            if finding is not None:
                self._found(finding)
                self._end(running)

    def worked(self) -> None:
        """A step with audits did not raise."""
        self._failed_steps = 0

    def blame(self) -> None:
        """A step raised with audits, and there was nothing else in it, or it worked without them."""
        self._failed_steps += 1
        if self.enabled and self._failed_steps >= self.config.max_failed_steps:
            self.switch_off(f"{self._failed_steps} steps in a row failed with them")

    def switch_off(self, why: str) -> None:
        """For steps that failed. Not during a step."""
        logger.error("audits are off: %s", why)
        self.close("step_failed")

    def end_step(self) -> None:
        """The step is over, its result applied or lost: what ended meanwhile gives its blocks back."""
        self._in_flight = False
        for sequence in self._doomed:
            self._let_go(sequence)
        self._doomed.clear()

    def fail(self, items: Sequence[PlanItem]) -> None:
        """The step raised, and some audit may have been why."""
        for item in items:
            running = self._running.get(item.sequence.seq_id)
            if running is not None:
                self._drop_case(running.rerun.case, "step_failed")
                self._end(running)

    def close(self, reason: str) -> None:
        """Drop every audit and take no more. The first reason stays."""
        if self._off is None:
            self._off = reason
        while self._running:
            running = next(iter(self._running.values()))
            self._drop_case(running.rerun.case, reason)
            self._end(running)
        while self._waiting:
            case, size = self._waiting.popleft()
            self._waiting_tokens -= size
            self._drop_case(case, reason)

    @property
    def sequences(self) -> list[DecodedSequence]:
        """Sequences that hold private blocks."""
        return [running.sequence for running in self._running.values()] + self._doomed

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue, rows and blocks agree."""
        assert self.enabled or not self.has_work
        assert self._in_flight or not self._doomed
        sizes = [*(size for _, size in self._waiting), *(running.size for running in self._running.values())]
        assert self._waiting_tokens == sum(sizes) <= self.config.max_waiting_tokens
        assert len(sizes) <= self.config.max_waiting
        assert sum(running.num_blocks for running in self._running.values()) <= self._manager.num_private_blocks
        for running in self._running.values():
            assert running.sequence.table.private
            assert len(running.sequence.table.blocks) <= running.num_blocks
            if not self._in_flight:
                running.sequence.check_integrity()
        held = sum(len(sequence.table.blocks) for sequence in self.sequences)
        assert held == self._manager.num_private_used, (held, self._manager.num_private_used)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Live requests do not pay for a fault of the audits."""
        try:
            yield
        except Exception:
            logger.exception("audits are off: they failed")
            self.close("fault")

    def _refusal(self, case: AuditCase, size: int) -> str | None:
        """Why there is no room for it."""
        config = self.config
        if len(self._waiting) + len(self._running) >= config.max_waiting:
            return "queue_full"
        if self._waiting_tokens + size > config.max_waiting_tokens:
            return "queue_tokens"
        if self._manager.blocks_for(case.num_tokens) > self._manager.num_private_blocks:
            return "too_large"
        return None

    def _plan(self, rows_left: int, live_rows: int) -> list[PlanItem]:
        share = self.config.row_share
        allowed = self._most_rows
        if live_rows:
            self._credit = min(float(self._most_rows), self._credit + share * live_rows)
            allowed = int(self._credit)
        rows = allowed = min(allowed, rows_left)
        items = []
        for running in self._running.values():
            if rows == 0:
                break
            items.append(self._item(running, rows))
            rows -= items[-1].num_tokens
        while rows > 0 and (admitted := self._admit()) is not None:
            items.append(self._item(admitted, rows))
            rows -= items[-1].num_tokens
        if live_rows:
            self._credit -= allowed - rows
        self.num_rows += allowed - rows
        return items

    def _item(self, running: _Running, rows: int) -> PlanItem:
        sequence = running.sequence
        num_tokens = min(rows, sequence.num_uncomputed)
        if not self._manager.reserve(sequence.table, sequence.num_computed + num_tokens):
            raise RuntimeError(f"an audit has no block left of the {running.num_blocks} set aside for it")
        return PlanItem(sequence, num_tokens, rival=running.rerun.expected)

    def _admit(self) -> _Running | None:
        """Start the audit that waits longest, if the blocks for all of it are there."""
        if not self._waiting:
            return None
        case, size = self._waiting[0]
        taken = sum(running.num_blocks for running in self._running.values())
        needed = self._manager.blocks_for(case.num_tokens)
        if taken + needed > self._manager.num_private_blocks:
            return None
        sequence = DecodedSequence(
            self._next_seq_id(),
            list(case.request.prompt_token_ids),
            plain_params(case.params),
            self._manager.new_private_table(),
        )
        rerun = Rerun(case, self._text_filters(case.request, case.index), self.config)
        running = _Running(rerun, sequence, needed, size)
        self._running[sequence.seq_id] = running
        self._waiting.popleft()  # last: a fault before it drops what waits
        return running

    def _end(self, running: _Running) -> None:
        del self._running[running.sequence.seq_id]
        self._waiting_tokens -= running.size
        if self._in_flight:
            self._doomed.append(running.sequence)
        else:
            self._let_go(running.sequence)

    def _let_go(self, sequence: DecodedSequence) -> None:
        self.released.append(sequence.seq_id)
        try:
            self._manager.free(sequence.table)
        except Exception:
            logger.exception("audits are off: the blocks of one could not be given back")
            self.close("fault")  # ends the others, one by one, and may come here again

    def _drop_case(self, case: AuditCase, reason: str) -> None:
        self._drop(case.request.request_id, case.index, reason)

    def _drop(self, request_id: str, index: int, reason: str) -> None:
        self._dropped[reason] += 1
        self._found(AuditFinding("dropped", request_id, index, what=reason))

    def _found(self, finding: AuditFinding) -> None:
        self._results[finding.result] += 1
        self.findings.append(finding)


def _case(choice: Choice, event: ChoiceEvent, trail: Trail) -> AuditCase:
    assert event.finish_reason is not None
    assert event.timing is not None
    return AuditCase(
        request=choice.group.request,
        index=choice.index,
        params=choice.sequence.params,
        token_ids=tuple(choice.sequence.output_token_ids),
        finish_reason=event.finish_reason,
        stop_reason=event.stop_reason,
        logprobs=tuple(trail.logprobs),
        prompt_logprobs=trail.prompt_logprobs,
        timing=event.timing,
    )
