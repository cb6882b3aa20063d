"""Which rows the next step runs for live requests.

Order. Everything goes by rank: priority (lower first), then arrival. Each step serves the running choices that
decode, then the running ones that still compute known tokens, then admits from the waiting queue, whose head nobody
overtakes. When blocks run out, drafts are done without first; then the running choice of the worst rank is preempted:
its blocks go back and it computes its tokens, outputs too, again later. Thus the running choice of the best rank moves
on in every step, and as any single choice fits into the pool (``add`` sees to that), all end.
"""

from __future__ import annotations

from itertools import islice

from kvcache.manager import KVCacheManager
from scheduler.budget import draft_allowance, share_drafts
from scheduler.choice import Choice, ChoiceState
from scheduler.config import SchedulerConfig
from scheduler.pace import StepPace
from scheduler.preemption import ForcedPreemption
from scheduler.roster import Roster
from specdec.plan import PlanItem
from specdec.sequence import Sequence


class Planner:
    """Admits and preempts through ``roster``, and reserves what the rows will write."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        roster: Roster,
        forced: ForcedPreemption,
        pace: StepPace | None = None,
    ) -> None:
        self.config = config
        self._manager = manager
        self._roster = roster
        self._forced = forced
        self._pace = pace

    def plan(self, now: float) -> tuple[list[PlanItem], list[PlanItem]]:
        """Items of the choices that decode, and of those that compute known tokens. Both empty: nobody can run."""
        roster = self._roster
        for choice in self._forced.select(list(roster.running)):
            roster.preempt(choice)
        decoding = self._reserve_decode([choice for choice in roster.running if choice.sequence.decoding])
        prefilling = [choice for choice in roster.running if not choice.sequence.decoding]

        pending = self._pending_prefill(prefilling)
        rows_left = self._rows(len(decoding), pending) - len(decoding)
        drafts_left = draft_allowance(rows_left, pending)
        wanted = [self._wanted_drafts(choice) for choice in decoding]
        if pending > rows_left - sum(wanted):
            wanted = [min(k, _growth(choice)) for k, choice in zip(wanted, decoding, strict=True)]
        grants = share_drafts(wanted, drafts_left)
        rows_left -= sum(grants)
        drafts_left -= sum(grants)

        prefill_items: list[PlanItem] = []
        while rows_left > 0:
            behind = prefilling.pop(0) if prefilling else roster.admit(now)
            if behind is None:
                break
            item = self._plan_prefill(behind, rows_left, drafts_left)
            prefill_items.append(item)
            rows_left -= item.num_tokens + item.max_drafts
            drafts_left -= item.max_drafts
        # Lookahead slots come last: no draft may take the block that somebody needs.
        decode_items = [
            PlanItem(choice.sequence, 1, self._reserve_drafts(choice.sequence, grant))
            for choice, grant in zip(decoding, grants, strict=True)
        ]
        return decode_items, prefill_items

    def _rows(self, num_decoding: int, pending: int) -> int:
        """Of the step, all in all."""
        most = self.config.max_num_batched_tokens
        if self._pace is None or not num_decoding or not pending:
            return most
        return self._pace.rows(num_decoding, most)

    def _pending_prefill(self, prefilling: list[Choice]) -> int:
        """Known tokens that could be computed in this step; prefix hits are not foreseen."""
        pending = sum(choice.sequence.num_uncomputed for choice in prefilling)
        roster = self._roster
        if roster.num_seats > 0 and not roster.blocked:
            pending += sum(len(choice.sequence.tokens) for choice in islice(roster.waiting, roster.num_seats))
        return pending

    def _wanted_drafts(self, choice: Choice) -> int:
        """k, but no more than can still be emitted beside the bonus token."""
        sequence = choice.sequence
        tokens_left = sequence.params.max_tokens - sequence.num_output_tokens
        context_left = self.config.max_model_len - len(sequence.tokens)
        return max(0, min(choice.max_drafts, tokens_left - 1, context_left - 1))

    def _reserve_decode(self, decoding: list[Choice]) -> list[Choice]:
        """Cover the last token of each, preempting from the worst rank on if need be; returns those still running."""
        for choice in decoding:
            table, needed = choice.sequence.table, choice.sequence.num_computed + 1
            # Those served before have a better rank, so the worst is this one or one behind it.
            while choice.state is ChoiceState.RUNNING and not self._manager.reserve(table, needed):
                self._roster.preempt(self._roster.running[-1])
        return [choice for choice in decoding if choice.state is ChoiceState.RUNNING]

    def _reserve_drafts(self, sequence: Sequence, drafts: int) -> int:
        """Cover lookahead slots for ``drafts`` behind all known tokens; returns how many there is room for."""
        known = len(sequence.tokens)
        if drafts and self._manager.reserve(sequence.table, known + drafts):
            return drafts
        return min(drafts, sequence.table.num_slots - known)

    def _plan_prefill(self, choice: Choice, rows_left: int, drafts_left: int) -> PlanItem:
        """A chunk of known tokens; their blocks were reserved at admission.

        A resumed sequence may speculate in the step that catches up, so a preemption costs it no drafts.
        """
        sequence = choice.sequence
        num_tokens = min(rows_left, sequence.num_uncomputed)
        drafts = 0
        if num_tokens == sequence.num_uncomputed and sequence.num_output_tokens:
            drafts = self._reserve_drafts(
                sequence, min(self._wanted_drafts(choice), drafts_left, rows_left - num_tokens)
            )
        return PlanItem(sequence, num_tokens, drafts)


def _growth(choice: Choice) -> int:
    """Drafts to keep rows for while prompts wait for them: some more than the choice's latest step verified.

    How many will be verified is decided when the step runs, often none; rows that nobody uses would delay a prompt.
    """
    return 2 * choice.last_drafted + 2
