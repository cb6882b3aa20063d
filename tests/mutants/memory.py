"""Faults in kvcache/ and scheduler/: reference counts, block tables, prefix cache, chunks, preemption."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_COLLISION = "it takes two prefixes of equal SHA-256"

MEMORY = (
    Mutant(
        "a block is free while another table holds it",
        "kvcache/pool.py",
        "        if references > 1:\n            self.num_shared",
        "        if references > 2:\n            self.num_shared",
        (
            "tests/kvcache/test_pool.py::test_block_is_used_until_its_last_reference_goes",
            "tests/kvcache/test_manager.py::test_shared_blocks_live_until_the_last_holder_frees",
        ),
    ),
    Mutant(
        "a second holder of a block is not counted",
        "kvcache/pool.py",
        "        self._references[block] = references + 1\n",
        "        self._references[block] = 1\n",
        ("tests/kvcache/test_pool.py::test_block_is_used_until_its_last_reference_goes",),
    ),
    Mutant(
        "evicted content can still be found",
        "kvcache/pool.py",
        "            del self._entries[entry.hash]\n",
        "",
        ("tests/kvcache/test_pool.py::test_evicted_content_is_found_no_more",),
    ),
    Mutant(
        "a table lists its newest blocks first",
        "kvcache/manager.py",
        "        blocks.extend(granted)\n",
        "        blocks[:0] = granted\n",
        ("tests/kvcache/test_manager.py", "tests/specdec/test_step.py"),
    ),
    Mutant(
        "rolling back cuts the block that the next token needs",
        "kvcache/manager.py",
        "        keep = -(-num_tokens // size)\n",
        "        keep = num_tokens // size\n",
        ("tests/kvcache/test_manager.py::test_truncate_returns_whole_surplus_blocks_only",),
    ),
    Mutant(
        "blocks that are not full are hashed",
        "kvcache/manager.py",
        "        first, full = len(hashes), num_tokens // size\n",
        "        first, full = len(hashes), -(-num_tokens // size)\n",
        ("tests/kvcache/test_manager.py::test_only_full_blocks_are_committed",),
    ),
    Mutant(
        "a prefix hit is not confirmed by the token ids",
        "kvcache/prefix.py",
        "self.parent is parent and self.packed_ids == packed_ids and self.salt == salt",
        "self.parent is parent and self.salt == salt",
        ("tests/kvcache/test_prefix.py::test_collision_of_block_ids_misses",),
        unseen=_COLLISION,
    ),
    Mutant(
        "a prefix hit is not confirmed by the salt",
        "kvcache/prefix.py",
        "self.parent is parent and self.packed_ids == packed_ids and self.salt == salt",
        "self.parent is parent and self.packed_ids == packed_ids",
        ("tests/kvcache/test_prefix.py::test_salts_stay_apart_even_if_their_hashes_collide",),
        unseen=_COLLISION,
    ),
    Mutant(
        "a block's hash does not cover the blocks before it",
        "kvcache/prefix.py",
        "        return self._hash(parent_hash + packed_ids)\n",
        "        return self._hash(packed_ids)\n",
        ("tests/kvcache/test_prefix.py::test_hash_is_chained_sha256_from_a_salted_root",),
    ),
    Mutant(
        "a cached prompt leaves no row to compute",
        "scheduler/roster.py",
        "            hits = self.manager.match_prefix(sequence.table, sequence.tokens, num_known - 1)\n",
        "            hits = self.manager.match_prefix(sequence.table, sequence.tokens, num_known)\n",
        ("tests/scheduler/test_scheduler.py::TestChoices::test_a_hit_leaves_one_row_to_compute",),
    ),
    Mutant(
        "a cached prefix counts one token more than it covers",
        "scheduler/roster.py",
        "        sequence.num_computed = hits\n",
        "        sequence.num_computed = min(hits + 1, num_known - 1) if hits else 0\n",
        ("tests/scheduler/test_scheduler.py::TestChoices::test_a_hit_leaves_one_row_to_compute",),
    ),
    Mutant(
        "a preempted sequence believes while it waits that its KV is still there",
        "scheduler/roster.py",
        "        choice.sequence.num_computed = 0\n",
        "",
        ("tests/scheduler/test_scheduler.py::TestOrder",),
    ),
    Mutant(
        "a preempted sequence keeps its blocks",
        "scheduler/roster.py",
        "        self._let_go(choice.sequence)\n        choice.sequence.num_computed = 0\n",
        "        self.released.append(choice.sequence.seq_id)\n        choice.sequence.num_computed = 0\n",
        ("tests/scheduler/test_scheduler.py::TestOutput::test_output_survives_preemption_at_every_step",),
    ),
    Mutant(
        "tenants share blocks: the salt does not reach the table",
        "scheduler/scheduler.py",
        "self._manager.new_table(salt)",
        "self._manager.new_table()",
        ("tests/scheduler/test_scheduler.py::TestChoices::test_salts_do_not_share",),
        unseen="what is shared is right; that it must not be shared is another property",
    ),
    Mutant(
        "a stop string in the middle of an accepted run does not trim the ids",
        "scheduler/scheduler.py",
        "            token_ids=output.token_ids[:kept],\n",
        "            token_ids=output.token_ids,\n",
        ("tests/scheduler/test_scheduler.py::TestOutput::test_stop_string_cuts_what_follows_in_the_same_step",),
        unseen="stop strings are text, and it deals in ids",
    ),
    Mutant(
        "drafts are not taken off the token budget",
        "scheduler/planner.py",
        "        rows_left -= sum(grants)\n",
        "",
        ("tests/scheduler/test_scheduler.py::TestOutput::test_output_does_not_depend_on_drafts_chunks_or_batch_mates",),
        unseen="more rows than allowed run in a step, and each row is what it would be alone",
    ),
)
