"""What an audit is, as plain data: the finished choice that is run again, and what came of it.

An audit runs a finished choice once more as its opposite: without drafts, without the prefix cache, in blocks that are
nobody else's; same ids, same seed. At L0 everything must be equal, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from scheduler.request import ChoiceTiming, EngineRequest
from specdec.params import SamplingParams
from specdec.plan import TokenLogprobs

AuditResult = Literal["match", "near_tie", "mismatch", "dropped"]
AUDIT_RESULTS: tuple[AuditResult, ...] = get_args(AuditResult)

SMALLEST_SHARE = 0.05  # below it a long request would take too many steps to be worth anything


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Raises ValueError, with the value, for a number out of range.

    ``share`` bounds what audits may take, in two ways. No step gives them more than ``share`` of the token budget (one
    row at least). And over the steps that also run live rows, audits get at most ``share`` rows for each live row, of
    which at most one step's worth is saved up. They never get a row that a live request could have used.
    """

    rate: float  # share of finished choices that are audited, 0 to 1
    share: float | None = None  # above 0, at most 1; None: ``rate``, but at least SMALLEST_SHARE
    max_waiting: int = 256  # audits that wait or run
    max_waiting_tokens: int = 131072  # their size: see AuditCase.size
    max_failed_steps: int = 3  # in a row, with audits to blame: then audits are off
    exact: bool = True  # the engine promises L0: a near tie is a mismatch too
    near_tie: float = 0.0  # below L0: how far apart two logits that nearly tie may be

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"the audit rate must be from 0 to 1, got {self.rate}")
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ValueError(f"the audit share must be above 0 and at most 1, got {self.share}")
        if self.max_failed_steps < 1:
            raise ValueError(f"audits must be allowed at least 1 failed step, got {self.max_failed_steps}")
        if self.max_waiting < 1 or self.max_waiting_tokens < 1:
            raise ValueError(
                f"the audit queue must hold at least 1 audit and 1 token, got {self.max_waiting} "
                f"and {self.max_waiting_tokens}"
            )

    @property
    def row_share(self) -> float:
        return max(self.rate, SMALLEST_SHARE) if self.share is None else self.share


class Trail:
    """What has to be kept of a live choice beyond its sequence, so that it can be audited: its logprobs."""

    __slots__ = ("logprobs", "prompt_logprobs")

    def __init__(self) -> None:
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()


_CHARS_PER_TOKEN = 4  # so much of a grammar's text takes the memory of a token


@dataclass(frozen=True, slots=True)
class AuditCase:
    """One choice that ended by itself ("stop" or "length"), and what its reader got. Picklable."""

    request: EngineRequest
    index: int
    params: SamplingParams
    token_ids: tuple[int, ...]  # committed: what a stop string cut off is not among them
    finish_reason: str
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...]  # empty if not asked for
    prompt_logprobs: tuple[TokenLogprobs, ...]
    timing: ChoiceTiming

    @property
    def num_tokens(self) -> int:
        """Tokens that running it again has to compute: of the last one nothing is asked."""
        num_prompt = len(self.request.prompt_token_ids)
        return max(num_prompt, num_prompt + len(self.token_ids) - 1)

    @property
    def size(self) -> int:
        """Tokens, kept logprobs, and whatever else grows with the request: what it takes of the queue's bound.

        The other choices of the request do not count: they share what is large.
        """
        kept = (*self.logprobs[:1], *self.prompt_logprobs[:1])
        per_position = 1 + max((1 + len(entry.top) for entry in kept), default=0)
        request, params, timing = self.request, self.params, self.timing
        return (
            len(request.prompt_token_ids)
            + len(request.prediction_token_ids)
            + (len(self.token_ids) + len(self.prompt_logprobs)) * per_position
            + sum(1 + len(word) for word in params.bad_words)
            + 2 * len(params.logit_bias)
            + len(params.allowed_token_ids or ())
            + len(params.stop_token_ids)
            + len(params.grammar or "") // _CHARS_PER_TOKEN
            + len(request.shown_special_ids)
            + sum(1 + len(stop) for stop in request.stop)
            + len(request.request_id)
            + len(request.cache_salt)
            + len(timing.acceptance_histogram)
            + len(timing.per_step_drafted)
            + len(timing.per_step_accepted)
        )


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """How an audit ended.

    ``what`` is the first thing that differed ("token_ids", "finish_reason", "stop_reason", "logprobs",
    "prompt_logprobs", "error"), or why it was dropped ("queue_full", "queue_tokens", "too_large", "shutting_down",
    "step_failed", "fault"; the last three also of what came when audits were off for that reason).
    ``position`` is the output index where it differed (the prompt index for prompt logprobs).
    """

    result: AuditResult
    request_id: str
    index: int
    what: str | None = None
    position: int | None = None
    gap: float | None = None  # by how much the rerun's token won over the one that was sent: see specdec.rival
    case: AuditCase | None = None  # of a mismatch or a near tie
    rerun_token_ids: tuple[int, ...] = ()  # at most as many as the case has
    rerun_finish_reason: str | None = None  # None: it was stopped where the case ends
    error: str | None = None  # the rerun's


@dataclass(frozen=True, slots=True)
class AuditStatus:
    """Numbers of now, and results since the start."""

    num_waiting: int
    num_running: int
    waiting_tokens: int  # of those that wait or run
    num_rows: int  # since the start
    results: dict[AuditResult, int]
    dropped: dict[str, int]  # by reason
    enabled: bool  # False: a fault or failed steps switched audits off, or the server is shutting down
