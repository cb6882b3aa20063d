"""Faults in who drafts and how far: draft model, early exit, slot tags, controller."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_HARMLESS = "what is drafted cannot change what is emitted"
_COSTS = "it costs time, and changes nothing"
_MODEL = "tests/specdec/test_model_drafter.py"
_ITSELF = f"{_MODEL}::test_the_target_as_its_own_draft_is_always_accepted"
_EXIT = "tests/specdec/test_exit_drafter.py"

DRAFTING = (
    Mutant(
        "a draft model's planes are the target's",
        "model/generic.py",
        "        self._names = tuple(plane.name for plane in executor.structure.planes[2 * index : 2 * index + 2])\n",
        "        planes = executor.structure.planes[2 * index : 2 * index + 2]\n"
        '        self._names = tuple(plane.name.replace("draft.", "target.") for plane in planes)\n',
        (
            "tests/model/test_draft_model.py"
            "::test_a_draft_shares_a_storage_with_the_target_and_touches_its_own_planes_only",
        ),
        unseen="it has no draft model",
    ),
    Mutant(
        "the draft model's rows stand one slot too far",
        "specdec/drafters/model_drafter.py",
        "[RowSpan(some.token_ids, some.start, some.blocks, len(some.token_ids) - some.samples) for some in part]",
        "[RowSpan(some.token_ids, some.start + 1, [*some.blocks, self._storage.scratch_block], "
        "len(some.token_ids) - some.samples) for some in part]",
        (_ITSELF,),
        unseen="it has no draft model",
    ),
    Mutant(
        "the draft model believes that one more token is computed",
        "specdec/drafters/model_drafter.py",
        "        track.num_computed = self.slots.valid_until(table.blocks, track.tags, track.num_computed, end)\n",
        "        valid = self.slots.valid_until(table.blocks, track.tags, track.num_computed, end)\n"
        "        track.num_computed = min(valid + 1, end)\n",
        (_ITSELF,),
        unseen=_HARMLESS,
    ),
    Mutant(
        "a slot keeps its tag while another prefix is written there",
        "specdec/drafters/model_drafter.py",
        "            self.slots.clear(slots)  # in case that the forward fails\n",
        "",
        (f"{_MODEL}::test_a_failure_over_slots_that_were_valid_leaves_them_unknown",),
        unseen=_HARMLESS,
    ),
    Mutant(
        "a slot's tag names its token alone, not what stands before it",
        "specdec/drafters/slot_tags.py",
        "    tag = ((tag ^ (token + 1)) * _FACTOR) & _MASK\n",
        "    tag = ((token + 1) * _FACTOR) & _MASK\n",
        ("tests/specdec/test_slot_tags.py::test_tags_are_equal_exactly_where_the_prefixes_are",),
        unseen=_HARMLESS,
    ),
    Mutant(
        "all tokens of a draft are sampled with the noise of its first one",
        "specdec/drafters/draft_sampling.py",
        "            RowJob(i, 1, one.sequence.params, one.sequence.num_output_tokens + len(one.ids))\n",
        "            RowJob(i, 1, one.sequence.params, one.sequence.num_output_tokens)\n",
        (_ITSELF,),
        unseen=_HARMLESS,
    ),
    Mutant(
        "penalties see the draft of the step before as emitted",
        "specdec/drafters/draft_sampling.py",
        "                kept[1].history.sync(one.sequence.tokens)  # without the draft\n",
        "                pass\n",
        (f"{_MODEL}::test_what_it_proposes_does_not_depend_on_what_it_proposed",),
        unseen=_HARMLESS,
    ),
    Mutant(
        "a draft of the first layers stands one position too far",
        "specdec/drafters/exit_drafter.py",
        "    return RowSpan([token], len(tokens) - 1 + len(ids), draft.sequence.table.blocks, 0)\n",
        "    return RowSpan([token], len(tokens) - 1 + len(ids) + (len(ids) > 0), draft.sequence.table.blocks, 0)\n",
        (f"{_EXIT}::test_all_layers_are_always_right_alone_and_in_a_ragged_batch",),
    ),
    Mutant(
        "a forward of the first layers runs one more",
        "model/fused_torch.py",
        "        decoder = self._layers[:num_layers]\n",
        "        decoder = self._layers[: None if num_layers is None else num_layers + 1]\n",
        ("tests/model/test_exit.py::test_the_first_layers_alone_write_the_bits_of_a_whole_forward",),
        unseen="layers that run too early write what they write again",
    ),
    Mutant(
        "a draft is cut to the picked length for the estimates, not for the rows",
        "specdec/drafters/draft.py",
        "        return Draft(self.drafter, self.token_ids[:length], cumulative)\n",
        "        return Draft(self.drafter, self.token_ids, cumulative)\n",
        ("tests/specdec/test_proposing.py",),
        unseen=_COSTS,
    ),
)
