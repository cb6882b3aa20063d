"""What a controller picks is what a step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.offline import OfflineConfig, OfflineEngine, Submission
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.cost import StepCost
from specdec.draft_length.lengths import Choice
from specdec.drafters.base import DraftRequest
from specdec.drafters.draft import Draft
from specdec.drafters.scored import ScoredDraft
from specdec.drafters.synthetic import OracleDrafter
from specdec.params import SamplingParams
from specdec.sequence import Sequence as Sequence_
from specdec.speculation import Speculation
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


class Bad:
    """A costly drafter that fails or answers nonsense in one of its calls."""

    name = "bad"

    def __init__(self, where: str, answer: Any) -> None:
        self._where, self._answer = where, answer

    def _reply(self, where: str, good: Any) -> Any:
        if where != self._where:
            return good
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [draft.token_ids for draft in self.propose_scored(requests)]

    def propose_scored(self, requests: Sequence[DraftRequest]) -> list[ScoredDraft]:
        cumulative = self._reply("cumulative", [0.9])
        return self._reply("propose", [ScoredDraft([5], cumulative) for _ in requests])

    def round_seconds(self, rows: int) -> float:
        return self._reply("round_seconds", 1e-6)

    def num_missing(self, sequence: Sequence_) -> int | None:
        return self._reply("num_missing", 0)

    def update(self, sequence: Sequence_, num_emitted: int) -> None:
        self._reply("update", None)

    def release(self, seq_id: int) -> None:
        self._reply("release", None)


@pytest.mark.parametrize("where", ["propose", "cumulative", "round_seconds", "num_missing", "update", "release"])
@pytest.mark.parametrize("answer", [RuntimeError("planted"), [float("nan")], [2.0], 10**400])
def test_nothing_that_a_drafter_answers_fails_a_step(where: str, answer: Any) -> None:
    executor = build_executor("llama", "bfloat16", vocab_size=97)
    bad = Bad(where, answer)
    engine = OfflineEngine(
        executor,
        OfflineConfig(num_speculative_tokens=3),
        num_blocks=64,
        speculate=lambda *_: Speculation({"bad": bad}, "bad", DraftLengthController(StepCost([(1, 1e-3), (64, 1e-3)]))),
    )
    submissions = [Submission((5, 6, 7), SamplingParams(seed=1, temperature=0.0, max_tokens=12)) for _ in range(2)]
    plain = OfflineEngine(executor, OfflineConfig(num_speculative_tokens=0), num_blocks=64).run(submissions)
    executor.bind(engine.storage)
    assert engine.run(submissions) == plain
    engine.check_clean()


class CostlyOracle(OracleDrafter):
    """Knows what each sequence will emit, and says that it takes time to tell."""

    def round_seconds(self, rows: int) -> float:
        return 1e-5

    def num_missing(self, sequence: Sequence_) -> int | None:
        return 0


def test_each_sequence_gets_the_costly_draft_that_was_made_for_it() -> None:
    executor = build_executor("llama", "bfloat16", vocab_size=97)
    submissions = [
        Submission((5 + i, 6, 7), SamplingParams(seed=i, temperature=1.0, max_tokens=12 + 3 * i), arrival=i)
        for i in range(4)
    ]
    plain = OfflineEngine(executor, OfflineConfig(num_speculative_tokens=0), num_blocks=64).run(submissions)
    oracle = CostlyOracle({i: list(done.token_ids) for i, done in enumerate(plain)})
    engine = OfflineEngine(
        executor,
        OfflineConfig(num_speculative_tokens=3),
        num_blocks=64,
        speculate=lambda *_: Speculation(
            {oracle.name: oracle}, oracle.name, DraftLengthController(StepCost([(1, 1e-3), (64, 1e-3)]))
        ),
    )
    assert engine.run(submissions) == plain
    drafted = sum(step.num_drafted for step in engine.steps)
    assert drafted == sum(step.num_accepted for step in engine.steps) > 20


def test_a_request_that_named_a_number_gets_its_drafts_while_asking_does_not_pay_for_the_others() -> None:
    controller = DraftLengthController(StepCost([(1, 1e-3), (64, 1e-3)]))
    engine = OfflineEngine(
        build_executor("llama", "bfloat16", vocab_size=97),
        OfflineConfig(num_speculative_tokens=3),
        num_blocks=64,
        speculate=lambda *_: Speculation({"wrong": Wrong()}, "wrong", controller),
    )
    controller.asking = lambda: False  # type: ignore[method-assign]
    params = [SamplingParams(seed=1, temperature=0.0, max_tokens=8, num_speculative_tokens=n) for n in (None, 2)]
    engine.run([Submission((5, 6, 7), each) for each in params])
    assert [step.num_drafted for step in engine.steps][1:5] == [2, 2, 2, 2]


class Wrong:
    """Drafts what never comes."""

    name = "wrong"

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[96] * request.max_drafts for request in requests]

    def update(self, sequence: Sequence_, num_emitted: int) -> None: ...

    def release(self, seq_id: int) -> None: ...
