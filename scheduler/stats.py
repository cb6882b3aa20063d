"""Plain numbers of scheduler and engine, one record a step. The metrics adapter reads these and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache.manager import KVCacheStats
from scheduler.audit import AuditFinding
from scheduler.request import ChoiceTiming
from specdec.plan import StepStats


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    request_id: str
    index: int
    finish_reason: str  # "stop", "length", "abort", "error"
    timing: ChoiceTiming
    finish_time: float  # same clock as the timing
    last_of_request: bool  # no other choice of the request is still open
    key: int = -1  # as in SequenceStep


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence that sampled in this step. Tokens that a stop string cut off are not counted."""

    num_emitted: int
    max_drafts: int  # drafts that the scheduler allowed
    num_drafted: int  # the draft length that was chosen: drafts verified
    num_accepted: int
    drafter: str = ""  # whose drafts; empty without
    key: int = -1  # of the choice: the same in all its steps, and of no other; says nothing of what it is about


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What happened since the record before. Usually one step; ``step`` is None if only aborts happened, or it raised.

    Audits have their own numbers and are in no other, but for the seconds and for the rows that ``step`` counts.
    Seconds are wall time. Counts are of this record alone, except those in ``kv``, which are since the start. The
    prefix counts of the record are of admitted sequences only; those in ``kv`` count a blocked one at every try.
    """

    step: StepStats | None
    step_seconds: float  # in the model thread and on the way there and back
    overhead_seconds: float  # deciding the step and applying its result
    num_prefill_tokens: int  # rows of prompt tokens, and of known tokens after a preemption
    num_decode_tokens: int  # rows of the last token of decoding sequences; drafts are in ``step``
    num_running: int  # choices, after the step
    num_waiting: int  # choices, after the step, preempted ones among them
    num_preemptions: int
    kv: KVCacheStats  # after the step; with used slots, so it knows the fragmentation
    prefix_queries: int  # tokens that admitted sequences asked the prefix cache for
    prefix_hits: int  # tokens it had
    num_prompt_tokens: int  # of the requests whose prompt was first computed in this step (each counted once)
    num_generation_tokens: int  # committed output tokens
    sequences: tuple[SequenceStep, ...]
    first_token_seconds: tuple[float, ...]  # arrival to first token, of choices that got theirs in this step
    inter_token_seconds: tuple[float, ...]  # gap to the tokens before, of the other choices that got some
    finished: tuple[FinishedChoice, ...]
    error: str | None = None  # the step raised
    num_audit_tokens: int = 0  # rows of audits
    audits: tuple[AuditFinding, ...] = ()  # that ended
    audits_enabled: bool | None = None  # after the step; None: there are none


@dataclass(slots=True)
class StepTally:
    """Collects the numbers of the next record."""

    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_audit_tokens: int = 0
    sequences: list[SequenceStep] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    inter_token_seconds: list[float] = field(default_factory=list)
    finished: list[FinishedChoice] = field(default_factory=list)
