"""Faults in what watches: the ledger, and audits in production."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_WATCHES = "it watches, and changes no answer"
_LEDGER = "tests/specdec/test_ledger.py"
_AUDIT = "tests/scheduler/test_rerun.py::test_what_counts_as_equal"
_COMPARED = "tests/scheduler/test_rerun.py::test_each_thing_that_a_reader_got_is_compared"
_FAULTS = "tests/scheduler/test_audit_faults.py"

GUARDS = (
    Mutant(
        "ledger: slots of rejected drafts count as verified",
        "kvcache/ledger.py",
        "        self._state[self._open_slots] = np.where(kept, VERIFIED, ROLLED_BACK)\n",
        "        self._state[self._open_slots] = VERIFIED\n",
        (_LEDGER,),
        unseen=_WATCHES,
    ),
    Mutant(
        "ledger: a block that went to somebody else in between counts as the table's own",
        "kvcache/ledger.py",
        "(view.blocks == granted) & (self._generation[safe] == lives) & ",
        "(view.blocks == granted) & ",
        (_LEDGER,),
        unseen=_WATCHES,
    ),
    Mutant(
        "ledger: a row may be written elsewhere than where its position is read",
        "kvcache/ledger_rows.py",
        "    if (written != slots).any():\n",
        "    if (written < 0).any():\n",
        (f"{_LEDGER}::test_a_slot_mapping_that_is_not_where_the_position_is_read",),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: at L0 too a near tie is forgiven",
        "scheduler/rerun.py",
        "        tie = not self._config.exact and what == ",
        "        tie = what == ",
        (_AUDIT,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: logprobs are not compared",
        "scheduler/rerun.py",
        "            elif self._differ(_at(output.logprobs, i), _at(case.logprobs, position)):\n",
        "            elif False:\n",
        (_AUDIT,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: what stopped it is not compared",
        "scheduler/rerun.py",
        "        if stop_reason != case.stop_reason:\n",
        "        if False:\n",
        (_COMPARED,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: why it ended is not compared",
        "scheduler/rerun.py",
        "        if (finish_reason, len(self.token_ids)) != (case.finish_reason, len(case.token_ids)):\n",
        "        if len(self.token_ids) != len(case.token_ids):\n",
        (_COMPARED,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: where it ended is not compared",
        "scheduler/rerun.py",
        "        if (finish_reason, len(self.token_ids)) != (case.finish_reason, len(case.token_ids)):\n",
        "        if finish_reason != case.finish_reason:\n",
        (_COMPARED,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: prompt logprobs that never came are equal",
        "scheduler/rerun.py",
        "        if self._num_scored != len(case.prompt_logprobs):\n",
        "        if False:\n",
        (_COMPARED,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: a step that fails over one fails the live requests beside it",
        "scheduler/engine.py",
        "(live := self.scheduler.without_audits(plan)) is not None",
        "(live := None) is not None",
        (_FAULTS,),
        unseen=_WATCHES,
    ),
    Mutant(
        "audit: a step that committed already runs again",
        "scheduler/scheduler.py",
        "        if not live or len(live) == len(plan.items) or mark(live) != self._before_step:\n",
        "        if not live or len(live) == len(plan.items):\n",
        (_FAULTS,),
        unseen=_WATCHES,
    ),
)
