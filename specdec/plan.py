"""What goes into a speculative step and what comes out: plain data, no tensor.

The scheduler makes the plan and reserves the blocks; the step runs it in the model thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.errors import ErrorType
from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlanItem:
    """Run ``num_tokens`` known tokens of ``sequence``, from ``num_computed`` on.

    If that reaches the last known token (``samples``), the step samples, and may verify up to ``max_drafts``
    drafts; the table already covers ``num_computed + num_tokens + max_drafts`` slots.

    ``rival``: the token that should come next. If another one is sampled, the output says by how much it won.
    """

    sequence: Sequence
    num_tokens: int
    max_drafts: int = 0
    rival: int | None = None

    @property
    def samples(self) -> bool:
        return self.sequence.num_computed + self.num_tokens == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    items: tuple[PlanItem, ...]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprobs of one position, from the raw logits: the token's own, its rank, the best ``top``."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first, lowest id first on a tie


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step did to one sequence. ``token_ids`` were appended to ``sequence.tokens`` already."""

    seq_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token id, if asked for
    # Logprobs of prompt tokens [prompt_start, prompt_start + len): the entry of prompt token i comes from row i - 1.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_start: int = 0
    num_drafted: int = 0
    num_accepted: int = 0  # accepted drafts that were emitted
    drafter: str = ""  # whose drafts were verified; empty without drafts
    draft_token_ids: tuple[int, ...] | None = None  # the drafts, if its params ask for them (trace_drafts)
    finish_reason: str | None = None  # "stop" (a stop token) or "length"
    stop_token_id: int | None = None  # which stop token; it is the last of token_ids
    blocks_trimmed: int = 0
    rival_gap: float | None = None  # if the first token is not the item's rival: see specdec.rival
    error: str | None = None  # this sequence alone failed; nothing was appended
    error_type: ErrorType = "server"  # with error


STAGES = ("draft", "build", "verify", "accept", "rollback", "sync")  # of a step, in the order in which they run


@dataclass(frozen=True, slots=True)
class StepStats:
    """Numbers of one step; seconds are wall time of the stage in the model thread."""

    num_rows: int = 0
    num_sequences: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    rollback_tokens: int = 0  # rejected drafts whose slots were written
    blocks_trimmed: int = 0
    blocks_moved: int = 0  # 0 by design
    alignment_bytes_moved: int = 0  # 0 by design
    stage_seconds: dict[str, float] = field(default_factory=dict)  # by STAGES
    # What the draft-length controller expected of the step; None without one.
    expected_tokens: float | None = None
    expected_seconds: float | None = None
    expected_speedup: float | None = None  # tokens a second, over those of the same step without drafts
    # What it took to build positions, slots and block_tables (in the stage build), and the mask (in verify).
    build_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: tuple[SequenceOutput, ...]  # one per plan item, in order
    stats: StepStats
