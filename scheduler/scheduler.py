"""Who runs in the next step, and what becomes of its result. Synchronous: no thread, no clock but the given one.

A step is three calls::

    plan = scheduler.schedule()      # decide: pick rows within the budget, reserve their blocks
    result = step.run(plan)          # elsewhere, maybe in another thread
    events = scheduler.apply(plan, result)

Between ``schedule`` and ``apply`` (or ``fail``) the planned sequences and the KV manager belong to the step; ``add``
and ``abort`` may be called all the same, and touch neither.

Which rows a step runs is decided by scheduler.planner. Audits (scheduler.audits) come behind that, in rows that are
left over: the live part of a plan is the same without them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from kvcache.manager import KVCacheManager
from scheduler.admission import check_form, check_size
from scheduler.audit import AuditFinding, AuditStatus, Trail
from scheduler.audits import Audits
from scheduler.choice import Choice, RequestGroup
from scheduler.config import SchedulerConfig
from scheduler.pace import StepPace
from scheduler.planner import Planner
from scheduler.preemption import ForcedPreemption, PreemptEveryStep, PreemptNever
from scheduler.request import ChoiceEvent, EngineRequest, StepTrace, TextDecision, TextFilterFactory
from scheduler.retry import Mark, live_items, mark
from scheduler.room import Reservation, WaitingRoom
from scheduler.roster import Roster
from scheduler.stats import SequenceStep, StepRecord, StepTally
from specdec.errors import ErrorType
from specdec.plan import PlanItem, SequenceOutput, StepPlan, StepResult, StepStats
from specdec.sequence import Sequence

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the sequences and their tables. Only one thread may call it."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        text_filters: TextFilterFactory,
        *,
        clock: Callable[[], float] = time.monotonic,
        forced_preemption: ForcedPreemption | None = None,
        pace: StepPace | None = None,
    ) -> None:
        self.config = config
        self._manager = manager
        self._text_filters = text_filters
        self._clock = clock
        default: ForcedPreemption = PreemptEveryStep() if config.preempt_every_step else PreemptNever()
        forced = default if forced_preemption is None else forced_preemption
        self._roster = roster = Roster(manager, config.max_num_seqs)
        self.room = WaitingRoom(
            config.max_waiting_requests,
            config.max_waiting_tokens,
            lambda: (roster.num_unstarted, roster.unstarted_tokens),
        )
        self._pace = pace
        self._planner = Planner(config, manager, self._roster, forced, pace)
        self._seq_ids = count()
        self._arrivals = count()
        self._before_step: tuple[Mark, ...] = ()  # of the live sequences of a plan with audits
        self._retried = False  # the step that runs is what was left of one that raised
        self._told_enabled: bool | None = None  # in the last record
        self._audits: Audits | None = None
        if config.audit is not None and config.audit.rate > 0.0:
            self._audits = Audits(
                config.audit,
                manager,
                text_filters,
                token_budget=config.max_num_batched_tokens,
                next_seq_id=lambda: next(self._seq_ids),
            )

    @property
    def has_work(self) -> bool:
        """An unfinished choice, an audit, or a step that was not applied yet."""
        if self._roster.choices or self._roster.in_flight is not None:
            return True
        return self._audits is not None and self._audits.has_work

    @property
    def num_running(self) -> int:
        """Choices with a seat."""
        return len(self._roster.running)

    def running_sequences(self) -> list[Sequence]:
        """The sequences that hold blocks, best rank first. To look at, not to change."""
        return [choice.sequence for choice in self._roster.running]

    @property
    def num_waiting(self) -> int:
        """Choices without a seat, preempted ones among them."""
        return len(self._roster.choices) - len(self._roster.running)

    @property
    def oldest_arrival(self) -> float | None:
        """When the one that has waited longest of the requests of which no choice has run arrived; None without any."""
        return self._roster.oldest_arrival

    @property
    def num_waiting_requests(self) -> int:
        """Requests of which no choice has run: what ``max_waiting_requests`` bounds."""
        return self._roster.num_unstarted

    @property
    def has_unreported(self) -> bool:
        """Since the last record a choice finished, an audit ended, or audits were switched off."""
        audits = self._audits
        if audits is not None and (audits.findings or audits.enabled != self._told_enabled):
            return True
        return bool(self._roster.tally.finished)

    @property
    def audit_status(self) -> AuditStatus | None:
        """None without audits."""
        return None if self._audits is None else self._audits.status

    def close_audits(self, reason: str = "shutting_down") -> None:
        """Drop the audits that wait or run, and take no more. May be called during a step."""
        if self._audits is not None:
            self._audits.close(reason)

    def add(self, request: EngineRequest, reservation: Reservation | None = None) -> None:
        """Queue all choices of ``request``, in the room that was reserved for it, if any.

        Raises ValueError for a malformed request, an id that is in use or a reservation of less, RequestTooLarge if a
        choice could never run, QueueFull if too many wait and nothing is reserved. After an exception nothing has
        changed.
        """
        check_form(request, self._roster.groups)
        check_size(request, self.config, self._manager)
        if reservation is None:
            self.room.check(1, len(request.prompt_token_ids))

        group = RequestGroup(request, next(self._arrivals))
        group.ready = not request.read_prefix_cache  # nothing to share, nothing to wait for
        salt = request.cache_salt.encode()
        for spec in request.choices:
            k = spec.params.num_speculative_tokens
            max_drafts = self.config.num_speculative_tokens if k is None else min(k, self.config.num_speculative_tokens)
            prompt, prediction = list(request.prompt_token_ids), request.prediction_token_ids
            table = self._manager.new_table(salt)
            sequence = Sequence(next(self._seq_ids), prompt, spec.params, table, prediction_token_ids=prediction)
            text_filter = self._text_filters(request, spec.index)
            choice = Choice(group, spec.index, sequence, text_filter, max_drafts)
            if self._audits is not None and self._audits.chosen(request.request_id, spec.index):
                choice.trail = Trail()
            group.choices.append(choice)
        if reservation is not None:
            reservation.take(len(request.prompt_token_ids))
        self._roster.add(group)

    def abort(self, request_id: str, error: str | None = None) -> list[ChoiceEvent]:
        """End all open choices of a request, with finish reason "abort", or "error" and that message.

        Its blocks are free when this returns, or when the step that runs now is applied. An unknown id does nothing.
        """
        now = self._clock()
        reason = "abort" if error is None else "error"
        events = [self._end(choice, reason, now, error) for choice in self._roster.open_choices(request_id)]
        return sorted(events, key=lambda event: event.index)

    def abort_all(self, error: str | None = None) -> list[ChoiceEvent]:
        """``abort`` every request."""
        return [event for request_id in list(self._roster.groups) for event in self.abort(request_id, error)]

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None if there is nothing to do.

        The planned sequences' tables cover what the step may write. Raises RuntimeError if the step before was not
        applied, or if choices wait and none can run (a fault: it must not happen).
        """
        roster = self._roster
        if roster.in_flight is not None:
            raise RuntimeError("the step before was not applied")
        decode_items, prefill_items = self._planner.plan(self._clock())
        items = decode_items + prefill_items
        if not items and roster.choices:
            raise RuntimeError(f"{len(roster.choices)} choices wait and none can run")
        if self._audits is not None:
            items = items + self._plan_audits(items)
        if not items:
            return None
        roster.tally.num_decode_tokens += len(decode_items)
        roster.tally.num_prefill_tokens += sum(item.num_tokens for item in prefill_items)
        roster.in_flight = StepPlan(tuple(items))
        return roster.in_flight

    def take_released(self) -> list[int]:
        """Ids of sequences that ended or were preempted since the last call.

        The step must forget what it keeps of them, in the model thread, before it runs the plan made last.
        """
        released, self._roster.released = self._roster.released, []
        if self._audits is not None:
            released += self._audits.released
            self._audits.released.clear()
        return released

    def apply(self, plan: StepPlan, result: StepResult) -> list[ChoiceEvent]:
        """Commit what the step did; returns the events in the order of the plan. Audits have none.

        A choice that was aborted meanwhile has no event. A choice whose output holds an error, or whose text filter
        fails, ends alone. Raises ValueError if the result does not belong to the plan: then nothing can be trusted.
        """
        retried = self._end_step(plan)
        if [output.seq_id for output in result.outputs] != [item.sequence.seq_id for item in plan.items]:
            raise ValueError("the step's outputs are not those of the plan")
        if self._audits is not None:
            if retried:
                self._audits.blame()
            elif len(live_items(plan)) < len(plan.items):
                self._audits.worked()
        if self._pace is not None:
            self._pace.observe(result.stats.num_rows, sum(result.stats.stage_seconds.values()))
        now = self._clock()
        events = []
        for item, output in zip(plan.items, result.outputs, strict=True):
            choice = self._roster.choices.get(output.seq_id)
            if choice is None:
                if self._audits is not None:
                    self._audits.apply(item, output)
            elif (event := self._apply_output(choice, item, output, now)) is not None:
                events.append(event)
        return events

    def without_audits(self, plan: StepPlan) -> StepPlan | None:
        """The step raised: its live part, to be run in its place before anybody live is failed.

        Its audits are dropped. None if it held none, or nothing else, or if the step did not leave its live sequences
        as they were. The step must forget the sequences of the new plan first: it may have seen drafts.
        """
        live = live_items(plan)
        if not live or len(live) == len(plan.items) or mark(live) != self._before_step:
            return None
        self._roster.check_in_flight(plan)
        assert self._audits is not None
        self._audits.fail(plan.items)
        self._retried = True
        self._roster.in_flight = StepPlan(live)
        return self._roster.in_flight

    def fail(self, plan: StepPlan, error: str) -> list[ChoiceEvent]:
        """The step raised: end every request that was part of it with ``error``, and drop its audits.

        If the plan holds audits, ask ``without_audits`` first: nobody live ends for one.
        """
        live = live_items(plan)
        changed = mark(live) != self._before_step  # while who was aborted still has blocks
        self._end_step(plan)
        if self._audits is not None and len(live) < len(plan.items):
            self._audits.fail(plan.items)
            if not live:
                self._audits.blame()
            elif changed:
                self._audits.switch_off("a step with them failed too late to be run again without them")
        choices = [self._roster.choices.get(item.sequence.seq_id) for item in plan.items]
        request_ids = dict.fromkeys(choice.group.request.request_id for choice in choices if choice is not None)
        return [event for request_id in request_ids for event in self.abort(request_id, error)]

    def take_record(
        self,
        step: StepStats | None,
        *,
        step_seconds: float = 0.0,
        overhead_seconds: float = 0.0,
        error: str | None = None,
    ) -> StepRecord:
        """The numbers since the last record. Call it after ``apply`` or ``fail``, never during a step."""
        tally, self._roster.tally = self._roster.tally, StepTally()
        findings: tuple[AuditFinding, ...] = ()
        if self._audits is not None and self._audits.findings:
            findings, self._audits.findings = tuple(self._audits.findings), []
        self._told_enabled = None if self._audits is None else self._audits.enabled
        running = self._roster.running
        return StepRecord(
            step=step,
            step_seconds=step_seconds,
            overhead_seconds=overhead_seconds,
            num_prefill_tokens=tally.num_prefill_tokens,
            num_decode_tokens=tally.num_decode_tokens,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_preemptions=tally.num_preemptions,
            kv=self._manager.stats((choice.sequence.table, choice.sequence.num_computed) for choice in running),
            prefix_queries=tally.prefix_queries,
            prefix_hits=tally.prefix_hits,
            num_prompt_tokens=tally.num_prompt_tokens,
            num_generation_tokens=tally.num_generation_tokens,
            sequences=tuple(tally.sequences),
            first_token_seconds=tuple(tally.first_token_seconds),
            inter_token_seconds=tuple(tally.inter_token_seconds),
            finished=tuple(tally.finished),
            error=error,
            num_audit_tokens=tally.num_audit_tokens,
            audits=findings,
            audits_enabled=self._told_enabled,
        )

    def block_map(self) -> str:
        """What each block of the KV cache is now, see kvcache.block_map. Not while a step runs."""
        return self._manager.block_map(
            (choice.sequence.table, choice.sequence.num_computed) for choice in self._roster.running
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless seats, queue, groups and blocks agree. Not while a step runs elsewhere."""
        self._roster.check_integrity([] if self._audits is None else self._audits.sequences)
        self.room.check_integrity()
        if self._audits is not None:
            self._audits.check_integrity()

    def _end_step(self, plan: StepPlan) -> bool:
        """Whether it was what was left of one that raised."""
        self._roster.end_step(plan)
        if self._audits is not None:
            self._audits.end_step()
        retried, self._retried = self._retried, False
        return retried

    def _plan_audits(self, live: list[PlanItem]) -> list[PlanItem]:
        assert self._audits is not None
        live_rows = sum(item.num_tokens + item.max_drafts for item in live)
        items = self._audits.plan(self.config.max_num_batched_tokens - live_rows, live_rows)
        self._roster.tally.num_audit_tokens += sum(item.num_tokens for item in items)
        self._before_step = mark(live) if items else ()
        return items

    def _apply_output(self, choice: Choice, item: PlanItem, output: SequenceOutput, now: float) -> ChoiceEvent | None:
        if output.error is not None:
            return self._end(choice, "error", now, output.error, output.error_type)
        group, sequence = choice.group, choice.sequence
        # A choice that only scores its prompt ends without having sampled from its last token.
        if sequence.num_computed >= sequence.num_prompt_tokens or output.finish_reason is not None:
            self._note_prompt(group)
        try:
            choice.add_prompt_logprobs(output)
            if not output.token_ids and output.finish_reason is None:
                return None
            decision = self._offer(choice, output)
            prompt_logprobs = choice.take_prompt_logprobs()
        except Exception as error:  # a filter is another room's code: this choice pays, nobody else
            logger.exception("choice %d of request %s failed", choice.index, group.request.request_id)
            return self._end(choice, "error", now, f"the text of the choice failed ({type(error).__name__})")
        kept = decision.num_kept
        self._count(choice, item, output, kept, now)
        event = ChoiceEvent(
            request_id=group.request.request_id,
            index=choice.index,
            token_ids=output.token_ids[:kept],
            text=decision.text,
            token_texts=decision.token_texts,
            logprobs=None if output.logprobs is None else output.logprobs[:kept],
            prompt_logprobs=prompt_logprobs,
            finish_reason="stop" if decision.stopped else output.finish_reason,
            stop_reason=decision.stop_reason if decision.stopped else output.stop_token_id,
            trace=None if output.draft_token_ids is None else _trace(output, kept),
        )
        if event.finish_reason is not None:
            self._roster.finish(choice, event.finish_reason, now)
            event = replace(event, timing=choice.timing(now))
        if choice.trail is not None and self._audits is not None:
            self._audits.follow(choice, event)
        return event

    def _note_prompt(self, group: RequestGroup) -> None:
        """Some choice of the group has computed the prompt: its blocks are committed and can be shared."""
        if not group.prompt_counted:
            group.prompt_counted = True
            self._roster.tally.num_prompt_tokens += len(group.request.prompt_token_ids)
        if not group.ready:
            group.ready = True
            self._roster.send_on(group)

    def _offer(self, choice: Choice, output: SequenceOutput) -> TextDecision:
        """Let the text filter decide; what it does not keep leaves the sequence."""
        offered = len(output.token_ids)
        decision = choice.text_filter.push(output.token_ids, output.finish_reason is not None)
        kept = decision.num_kept
        if not 0 <= kept <= offered or (kept < offered and not decision.stopped):
            raise ValueError(f"the text filter kept {kept} of {offered} tokens, stopped={decision.stopped}")
        if kept < offered:
            # The tokens are verified, so their committed blocks are right: only the sequence ends here.
            del choice.sequence.tokens[len(choice.sequence.tokens) - (offered - kept) :]
        return decision

    def _count(self, choice: Choice, item: PlanItem, output: SequenceOutput, kept: int, now: float) -> None:
        tally, accepted = self._roster.tally, min(output.num_accepted, kept)
        choice.last_drafted = output.num_drafted
        if output.num_drafted:
            choice.count_drafts(output.num_drafted, accepted)
        if kept:
            choice.count_predicted(output.token_ids[:kept], accepted)
            gap = choice.count_tokens(kept, now)
            if gap is None:
                tally.first_token_seconds.append(now - choice.group.request.arrival_time)
            else:
                tally.inter_token_seconds.append(gap)
        tally.num_generation_tokens += kept
        tally.sequences.append(
            SequenceStep(kept, item.max_drafts, output.num_drafted, accepted, output.drafter, output.seq_id)
        )

    def _end(
        self, choice: Choice, reason: str, now: float, error: str | None, error_type: ErrorType = "server"
    ) -> ChoiceEvent:
        """End a choice that has no more tokens to give."""
        self._roster.finish(choice, reason, now)
        return ChoiceEvent(
            choice.group.request.request_id,
            choice.index,
            finish_reason=reason,
            error=error,
            error_type=error_type,
            timing=choice.timing(now),
        )


def _trace(output: SequenceOutput, kept: int) -> StepTrace:
    assert output.draft_token_ids is not None
    return StepTrace(output.draft_token_ids, min(output.num_accepted, kept), output.drafter)
