"""Faults in model/: rows, positions, slots, attention, kernels."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ATTENTION = "tests/model/test_attention.py"
_EVERYWHERE = "every row is wrong alike, alone and in batches"

FORWARD = (
    Mutant(
        "the positions of a sequence's rows are off by one behind its second row",
        "model/batch.py",
        "            positions=torch.from_numpy(positions),\n",
        "            positions=torch.from_numpy(positions + (row_in_span > 1)),\n",
        ("tests/model/test_batch.py::test_every_row_is_what_it_would_be_alone",),
    ),
    Mutant(
        "the slots of the lookahead rows are off by one",
        "model/batch.py",
        "blocks * block_size + positions % block_size\n",
        "blocks * block_size + np.minimum(positions % block_size + (row_in_span > 0), block_size - 1)\n",
        ("tests/model/test_batch.py::test_every_row_is_what_it_would_be_alone",),
    ),
    Mutant(
        "logits come from the row behind the wanted one",
        "model/batch.py",
        "np.flatnonzero(row_in_span >= np.repeat([span.logits_from for span in spans], counts))\n",
        "np.flatnonzero(row_in_span >= np.repeat([span.logits_from for span in spans], counts))\n"
        "        logits_rows = np.minimum(logits_rows + 1, np.repeat(row_starts[1:], counts)[logits_rows] - 1)\n",
        ("tests/model/test_batch.py::test_every_row_is_what_it_would_be_alone",),
    ),
    Mutant(
        "a verify row sees the drafts behind it",
        "model/attention.py",
        "            seen = lanes <= row_positions\n",
        "            seen = (lanes <= newest) & (row_positions >= 0)\n",
        (f"{_ATTENTION}::test_equals_softmax_over_the_whole_context",),
        subject="llama and generic",
    ),
    Mutant(
        "masked lanes read slots that the sequence has not written",
        "model/attention.py",
        "            read = lanes.clamp(max=newest)\n",
        "            read = lanes.clamp(max=len(blocks) * self.block_size - 1)\n",
        (f"{_ATTENTION}::test_nan_in_slots_and_rows_that_nobody_owns_changes_no_bit",),
        subject="llama and generic",
    ),
    Mutant(
        "the sliding window is one too wide",
        "model/attention.py",
        "                seen &= lanes > row_positions - window\n",
        "                seen &= lanes >= row_positions - window\n",
        (f"{_ATTENTION}::test_equals_softmax_over_the_whole_context",),
        unseen=_EVERYWHERE,
        subject="gemma2 and generic",
    ),
    Mutant(
        "chunks of the context are merged without their own maximum",
        "model/attention.py",
        "            new_out = out * old_share + chunk_out * new_share\n",
        "            new_out = out + chunk_out\n",
        (f"{_ATTENTION}::test_equals_softmax_over_the_whole_context",),
        unseen=_EVERYWHERE,
        subject="llama and generic",
    ),
    Mutant(
        "K of the newest row of a tile is not written",
        "model/generic.py",
        "        keys.index_copy_(0, rows.slots, call.key[: rows.count])\n",
        "        keys.index_copy_(0, rows.slots[: max(1, rows.count - 1)], call.key[: max(1, rows.count - 1)])\n",
        ("tests/model/test_generic.py::test_equals_the_models_own_eager_forward",),
        subject="llama and generic",
    ),
    Mutant(
        "on torch the rotary position is the row's place in its tile",
        "model/fused_torch.py",
        "        positions[:count] = batch.positions[first:last]\n",
        "        positions[:count] = torch.arange(count)\n",
        ("tests/model/test_fused.py::test_float32_logits_equal_hugging_face_eager[llama-torch]",),
        subject="llama and torch",
    ),
    Mutant(
        "compiled: an exact tie of greedy rows goes to the highest id",
        "model/kernels/csrc/sampling.cpp",
        "    out[r] = greatest(row, vocab, peak) ? first_equal(row, vocab, peak) : -1;\n",
        "    if (!greatest(row, vocab, peak)) { out[r] = -1; return; }\n"
        "    for (int64_t v = vocab - 1; v >= 0; --v) if (row[v] == peak) { out[r] = v; return; }\n",
        ("tests/model/test_kernels_sampling.py::test_argmax_takes_the_lowest_id_on_a_tie",),
        unseen="with and without drafts alike, and real logits hardly ever tie",
        compiled=True,
    ),
)
