"""What a controller picks is what a step verifies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.offline import OfflineConfig, OfflineEngine, Submission
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.cost import StepCost
from specdec.draft_length.lengths import Choice
from specdec.drafters.draft import Draft
from specdec.params import SamplingParams
from tests.model.families import build_executor


def test_a_step_verifies_as_much_of_each_draft_as_was_picked_and_no_row_more(monkeypatch: pytest.MonkeyPatch) -> None:
    settle = DraftLengthController.settle
    picked: dict[int, int] = {}  # by step
    proposed = 0
    engine = OfflineEngine(
        build_executor("llama", "bfloat16", vocab_size=97),
        OfflineConfig(num_speculative_tokens=6, drafter="suffix", draft_length="auto"),
        num_blocks=64,
        measure=lambda executor, storage, rows: StepCost([(1, 1e-3), (4, 1.1e-3), (8, 4e-3), (64, 4e-2)]),
    )

    def heard(self: DraftLengthController, drafts: Sequence[Draft | None], *, rows: int, tokens: int) -> Choice:
        nonlocal proposed
        choice = settle(self, drafts, rows=rows, tokens=tokens)
        picked[len(engine.steps)] = sum(choice.lengths)
        proposed += sum(len(draft.token_ids) for draft in drafts if draft is not None)
        return choice

    monkeypatch.setattr(DraftLengthController, "settle", heard)
    params = SamplingParams(seed=1, temperature=0.0, max_tokens=40, allowed_token_ids=(5, 6, 7))
    engine.run([Submission((5, 6, 7) * (3 + i), params, arrival=i) for i in range(3)])
    verified = {i: step.num_drafted for i, step in enumerate(engine.steps)}
    assert verified == {i: picked.get(i, 0) for i in verified}
    assert 0 < sum(picked.values()) < proposed  # some were cut
    decoding = engine.steps[len(engine.steps) // 2 :]
    assert all(step.num_rows == step.num_sequences + step.num_drafted for step in decoding)
