"""Faults in specdec/: verification, rollback, history, sampling, seeds, logprobs, drafts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STEP = "tests/specdec/test_step.py::test_a_step_emits_the_verdict_and_rolls_back_the_rest"
_VERDICT = "tests/specdec/test_verification.py::test_verdict"
_ON_OFF = "tests/specdec/test_pathwise.py::test_speculation_on_equals_off"
_SAME_LAW = "the law is another one, but the same with and without drafts"

DECODING = (
    Mutant(
        "at a rejection the draft is emitted, not the target's token",
        "specdec/verification.py",
        "        emitted.append(token)\n",
        "        emitted.append(drafts[row] if row < len(drafts) else token)\n",
        (_VERDICT, _STEP),
    ),
    Mutant(
        "one token too many is accepted: the first mismatch does not end the run",
        "specdec/verification.py",
        "        if not matches:\n            break\n",
        "        if row > accepted:\n            break\n",
        (_VERDICT, _STEP),
    ),
    Mutant(
        "no bonus token after full acceptance",
        "specdec/verification.py",
        "    for row in range(len(drafts) + 1):\n",
        "    for row in range(max(1, len(drafts))):\n",
        (_VERDICT, _STEP),
        unseen="the bonus token is the first of the next step instead: slower, and the same",
    ),
    Mutant(
        "a stop token in the middle of an accepted run does not end it",
        "specdec/verification.py",
        "        if token in stop_token_ids:\n",
        "        if token in stop_token_ids and not matches:\n",
        (_VERDICT, "tests/specdec/test_limits.py::test_a_stop_token_trims_ids_and_logprobs_wherever_it_falls"),
    ),
    Mutant(
        "an accepted run exceeds max_tokens",
        "specdec/verification.py",
        "        if len(emitted) == tokens_left:\n",
        "        if len(emitted) >= tokens_left and not matches:\n",
        (_VERDICT,),
        unseen="the step asks for no drafts beyond the cap, so only the verifier's own tests come this far",
    ),
    Mutant(
        "the bonus token is sampled from the row before it",
        "specdec/step.py",
        "            return self._sampler.sample_row(rows[first + i], params, t + i, state, mask)\n",
        "            row = rows[first + min(i, max(0, len(drafts) - 1))]\n"
        "            return self._sampler.sample_row(row, params, t + i, state, mask)\n",
        ("tests/specdec/test_limits.py::test_restrictions_hold_on_accepted_recovered_and_bonus_tokens", _ON_OFF),
    ),
    Mutant(
        "the noise is keyed by the row in the batch, not by the output index",
        "specdec/step.py",
        "        t = sequence.num_output_tokens\n",
        "        t = first\n",
        (_ON_OFF,),
    ),
    Mutant(
        "all rows of a verify use the output index of the first one",
        "specdec/sampling.py",
        "torch.tensor([job.t + i for job in drawn for i in range(job.count)])",
        "torch.tensor([job.t for job in drawn for i in range(job.count)])",
        (
            "tests/specdec/test_sampling.py::test_a_mixed_batch_is_one_argmax_and_one_keyed_call",
            "tests/specdec/test_pathwise.py::test_the_batch_path_of_kernels_changes_nothing",
        ),
    ),
    Mutant(
        "penalties and masks see a draft before it is verified",
        "specdec/step.py",
        "            if i > 0:\n                state.history.push(drafts[i - 1])",
        "            if i < len(drafts):\n                state.history.push(drafts[i])",
        ("tests/specdec/test_step.py::test_penalty_state_equals_the_committed_tokens_after_every_step", _ON_OFF),
    ),
    Mutant(
        "the history takes tokens back but keeps their counts",
        "specdec/history.py",
        "            self._counts[entry] -= 1\n",
        "",
        ("tests/specdec/test_history.py::test_counts_equal_a_counter_of_the_tokens_after_every_move",),
        unseen="the step pushes a draft only once it is accepted, so nothing is taken back while it runs",
    ),
    Mutant(
        "num_computed one too far after a rejection",
        "specdec/step.py",
        "            sequence.num_computed = len(sequence.tokens) - 1\n",
        "            sequence.num_computed = len(sequence.tokens) - 1 + (verdict.num_accepted < len(one.drafts))\n",
        (_STEP,),
    ),
    Mutant(
        "num_computed one short after a rejection",
        "specdec/step.py",
        "            sequence.num_computed = len(sequence.tokens) - 1\n",
        "            sequence.num_computed = len(sequence.tokens) - 1 - (verdict.num_accepted < len(one.drafts))\n",
        (_STEP,),
    ),
    Mutant(
        "after full acceptance the bonus token counts as computed: the next step reads stale KV",
        "specdec/step.py",
        "            sequence.num_computed = len(sequence.tokens) - 1\n",
        "            full = 0 < len(one.drafts) == verdict.num_accepted\n"
        "            sequence.num_computed = len(sequence.tokens) - 1 + full\n",
        (_STEP,),
    ),
    Mutant(
        "a chunk of a prompt counts one token more than it computed",
        "specdec/step.py",
        "            sequence.num_computed = written\n",
        "            sequence.num_computed = written + 1\n",
        ("tests/specdec/test_step.py::test_a_chunk_that_does_not_reach_the_last_token_only_advances",),
    ),
    Mutant(
        "a chunk that ends one token early samples all the same",
        "specdec/plan.py",
        "        return self.sequence.num_computed + self.num_tokens == len(self.sequence.tokens)\n",
        "        return self.sequence.num_computed + self.num_tokens >= len(self.sequence.tokens) - 1\n",
        ("tests/specdec/test_pathwise.py::test_random_plans_always_give_the_same_tokens",),
    ),
    Mutant(
        "surplus blocks of rejected drafts stay in the table",
        "specdec/step.py",
        "            trimmed = self._manager.truncate(sequence.table, len(sequence.tokens))\n",
        "            trimmed = 0\n",
        ("tests/specdec/test_step.py::test_whole_surplus_blocks_go_back_and_the_next_tokens_slot_stays",),
    ),
    Mutant(
        "rejected tokens are committed to the prefix cache",
        "specdec/step.py",
        "            self._manager.commit(sequence.table, sequence.tokens, max(written, sequence.num_computed))\n",
        "            guess = [*sequence.tokens[:written], *one.drafts]\n"
        "            self._manager.commit(sequence.table, guess, len(guess))\n",
        ("tests/specdec/test_step.py::test_rejected_tokens_never_enter_the_prefix_cache",),
    ),
    Mutant(
        "a block is committed before the KV of its last token is written",
        "specdec/step.py",
        "            self._manager.commit(sequence.table, sequence.tokens, max(written, sequence.num_computed))\n",
        "            room = sequence.table.num_slots\n"
        "            self._manager.commit(sequence.table, sequence.tokens, min(len(sequence.tokens), room))\n",
        (
            "tests/specdec/test_step.py::test_rejected_tokens_never_enter_the_prefix_cache",
            "tests/exactness/test_follow_up.py",
        ),
    ),
    Mutant(
        "temperature 0: an exact tie goes to the highest id",
        "specdec/sampling.py",
        "    token = int(row.argmax())  #",
        "    token = len(row) - 1 - int(row[::-1].argmax())  #",
        (
            "tests/specdec/test_sampling.py::test_an_exact_tie_goes_to_the_lowest_id",
            "tests/specdec/test_pathwise.py::test_planted_ties_go_to_the_lowest_id_with_and_without_drafts",
        ),
        unseen="with and without drafts alike, and real logits hardly ever tie",
    ),
    Mutant(
        "temperature 0 with penalties: an exact tie goes to the highest id",
        "specdec/sampling.py",
        "            return int(row.argmax())\n",
        "            return len(row) - 1 - int(row[::-1].argmax())\n",
        (
            "tests/specdec/test_sampling.py::test_an_exact_tie_goes_to_the_lowest_id",
            "tests/specdec/test_pathwise.py::test_planted_ties_go_to_the_lowest_id_with_and_without_drafts",
        ),
        unseen="with and without drafts alike, and real logits hardly ever tie",
    ),
    Mutant(
        "the noise belongs to a place among the candidates, not to a token id",
        "specdec/sampling.py",
        "exponentials(seed, t, runners.token_ids, vocab_size)",
        "exponentials(seed, t, np.arange(len(runners.token_ids)), vocab_size)",
        ("tests/specdec/test_sampling.py::test_a_filter_that_keeps_the_winner_does_not_change_the_token",),
        unseen=_SAME_LAW,
    ),
    Mutant(
        "every choice has the seed of choice 0",
        "specdec/noise.py",
        "    return seed if index == 0 else _splitmix64(_splitmix64(seed) ^ index)\n",
        "    return seed\n",
        ("tests/specdec/test_noise.py::test_choice_0_keeps_the_seed_and_the_others_get_their_own",),
        unseen="each choice equals itself alone; that they differ is another property",
    ),
    Mutant(
        "frequency_penalty counts a token once however often it stands there",
        "specdec/pipeline.py",
        "        seen -= params.frequency_penalty * counts\n",
        "        seen -= params.frequency_penalty * (counts > 0)\n",
        (
            "tests/specdec/test_pipeline.py::test_repetition_covers_prompt_and_output_but_frequency_and_presence_the_output_only",
        ),
        unseen=_SAME_LAW,
    ),
    Mutant(
        "the logprobs of a run all come from its first row",
        "specdec/step.py",
        "            token_logprobs(rows[first + i], token, top, normaliser)\n",
        "            token_logprobs(rows[first], token, top, normaliser)\n",
        (_ON_OFF,),
    ),
    Mutant(
        "drafts continue the text of another sequence",
        "specdec/drafters/ngram.py",
        "        return [self._propose(request.sequence, request.max_drafts) for request in requests]\n",
        "        return [self._propose(requests[0].sequence, request.max_drafts) for request in requests]\n",
        ("tests/specdec/test_ngram.py::test_each_request_gets_its_own_draft",),
        unseen="what is drafted cannot change what is emitted",
    ),
)
