"""One audit while it runs: a sequence of its own, compared with the case token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.audit import AuditCase, AuditConfig, AuditFinding, AuditResult
from scheduler.request import TextFilter
from specdec.params import SamplingParams
from specdec.plan import SequenceOutput, TokenLogprobs

NO_DRAFTER = ""  # a name that no drafter has: none is told of the sequence


def plain_params(params: SamplingParams) -> SamplingParams:
    """The same request without speculation."""
    return replace(params, num_speculative_tokens=0, drafter=NO_DRAFTER)


class Rerun:
    """Feed it each output of its sequence.

    It goes on behind a difference, so that both outputs can be laid side by side, but never further than the case.
    """

    __slots__ = ("_config", "_filter", "_first", "_num_scored", "case", "token_ids")

    def __init__(self, case: AuditCase, text_filter: TextFilter, config: AuditConfig) -> None:
        self.case = case
        self.token_ids: list[int] = []
        self._filter = text_filter
        self._config = config
        self._num_scored = 0  # prompt tokens whose logprobs came
        self._first: tuple[str, int, float | None] | None = None  # the first difference: what, position, gap

    @property
    def expected(self) -> int | None:
        """The token that has to come next; None behind the end, or where it could not be compared any more."""
        position = len(self.token_ids)
        return self.case.token_ids[position] if self._first is None and position < len(self.case.token_ids) else None

    def take(self, output: SequenceOutput) -> AuditFinding | None:
        """Compare; returns the finding at the end. Raises what the text filter raises."""
        case = self.case
        if output.error is not None:
            self._note("error", len(self.token_ids))
            return self._finding("error", output.error)
        for i, entry in enumerate(output.prompt_logprobs or (), start=output.prompt_start - 1):
            self._num_scored += 1
            if i >= len(case.prompt_logprobs) or self._differ(entry, case.prompt_logprobs[i]):
                self._note("prompt_logprobs", i + 1)
        if not output.token_ids and output.finish_reason is None:
            return None
        decision = self._filter.push(output.token_ids, output.finish_reason is not None)
        self._compare(output, decision.num_kept)
        finish_reason = "stop" if decision.stopped else output.finish_reason
        stop_reason = decision.stop_reason if decision.stopped else output.stop_token_id
        if finish_reason is None and len(self.token_ids) < len(case.token_ids):
            return None
        if self._num_scored != len(case.prompt_logprobs):
            self._note("prompt_logprobs", self._num_scored + 1)
        if (finish_reason, len(self.token_ids)) != (case.finish_reason, len(case.token_ids)):
            self._note("finish_reason", len(self.token_ids))
        if stop_reason != case.stop_reason:
            self._note("stop_reason", len(self.token_ids))
        return self._finding(finish_reason)

    def _compare(self, output: SequenceOutput, num_kept: int) -> None:
        case = self.case
        for i, token_id in enumerate(output.token_ids[:num_kept]):
            position = len(self.token_ids)
            self.token_ids.append(token_id)
            if position >= len(case.token_ids):
                continue  # the end will be another one
            if token_id != case.token_ids[position]:
                self._note("token_ids", position, output.rival_gap if i == 0 else None)
            elif self._differ(_at(output.logprobs, i), _at(case.logprobs, position)):
                self._note("logprobs", position)

    def _differ(self, one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
        if self._config.exact or one is None or other is None or one.token_id != other.token_id:
            return one != other
        return not abs(one.logprob - other.logprob) <= self._config.near_tie and one.logprob != other.logprob

    def _note(self, what: str, position: int, gap: float | None = None) -> None:
        if self._first is None:
            self._first = (what, position, gap)

    def _finding(self, finish_reason: str | None, error: str | None = None) -> AuditFinding:
        case = self.case
        if self._first is None:
            return AuditFinding("match", case.request.request_id, case.index)
        what, position, gap = self._first
        tie = not self._config.exact and what == "token_ids" and gap is not None and gap <= self._config.near_tie
        result: AuditResult = "near_tie" if tie else "mismatch"
        return AuditFinding(
            result,
            case.request.request_id,
            case.index,
            what=what,
            position=position,
            gap=gap,
            case=case,
            rerun_token_ids=tuple(self.token_ids),
            rerun_finish_reason=finish_reason,
            error=error,
        )


def _at(entries: Sequence[TokenLogprobs] | None, index: int) -> TokenLogprobs | None:
    """None where nothing was asked for, and where it is missing."""
    return entries[index] if entries is not None and index < len(entries) else None
