"""The whole of speculation, as the server builds it, changes no token: every drafter, auto, and the controller's picks.

The costs are invented, and so odd that every kind of decision comes about.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from bench.offline import OfflineConfig, OfflineEngine, Submission
from kvcache.storage import DRAFT_PLANES, KVStorage
from model.generic import GenericExecutor
from model.interface import Executor
from specdec.draft_length.cost import StepCost
from specdec.draft_length.worth import Worth
from specdec.params import SamplingParams
from specdec.plan import StepPlan, StepResult
from specdec.sampling import Sampler
from specdec.speculation import SpeculationConfig, build_speculation
from tests.model.families import build_executor

VOCAB = 97
PARAMS = [
    SamplingParams(seed=1, temperature=0.0, max_tokens=24),
    SamplingParams(seed=2, temperature=0.8, max_tokens=24),
    SamplingParams(seed=3, temperature=0.7, top_p=0.9, frequency_penalty=0.4, max_tokens=16),
    SamplingParams(seed=4, temperature=0.0, max_tokens=24, num_speculative_tokens=3),
    SamplingParams(seed=5, temperature=0.0, max_tokens=16, num_speculative_tokens=0),
    SamplingParams(seed=6, temperature=1.0, min_p=0.05, logprobs=2, max_tokens=24),
]


def submissions() -> list[Submission]:
    prompts = [[5, 6, 7] * 9, [11, 3, 3, 50], [8] * 33, [5, 6, 7] * 3 + [1], [2, 60], list(range(40))]
    return [
        Submission(tuple(prompt), params, arrival=4 * i)
        for i, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]


@pytest.fixture(autouse=True)
def _asked_in_two_of_three_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever time the host takes to draft."""
    turn = itertools.count()
    monkeypatch.setattr(Worth, "asking", lambda self: next(turn) % 3 > 0)


class OddCosts:
    """Each executor gets another curve: the first flat, the next steep, and so on."""

    def __init__(self, start: int) -> None:
        self.turn = itertools.count(start)

    def __call__(self, executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
        slope = (0.0, 0.3, 0.02)[next(self.turn) % 3]
        return StepCost([(rows, 1e-4 * (1.0 + slope * rows)) for rows in (1, 4, 16, 64)])


class Counting(OfflineEngine):
    """Knows whose drafts were accepted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.accepted: Counter[str] = Counter()

    def run_step(self, plan: StepPlan) -> StepResult:
        result = super().run_step(plan)
        for output in result.outputs:
            self.accepted[output.drafter] += output.num_accepted
        return result


@pytest.fixture(scope="module")
def target() -> GenericExecutor:
    return build_executor("llama", "bfloat16", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def draft() -> GenericExecutor:
    return build_executor("llama", "bfloat16", vocab_size=VOCAB, num_hidden_layers=1, plane_prefix=DRAFT_PLANES)


@pytest.fixture(scope="module")
def plain(target: GenericExecutor) -> Sequence[Any]:
    return OfflineEngine(target, OfflineConfig(num_speculative_tokens=0), num_blocks=200).run(submissions())


@pytest.mark.case("V 41758")
@pytest.mark.case("T 2208")
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize(
    ("drafter", "draft_length", "exit_layers"),
    [
        ("auto", "auto", 1),
        ("auto", "fixed", 1),
        ("auto", "auto", None),
        ("model", "auto", None),
        ("model", "fixed", None),
        ("exit", "auto", None),
        ("exit", "fixed", 1),
        ("suffix", "auto", None),
        ("ngram", "auto", None),
        ("random", "auto", None),
    ],
)
def test_every_way_to_speculate_gives_the_output_of_plain_decoding(
    target: GenericExecutor,
    draft: GenericExecutor,
    plain: Sequence[Any],
    drafter: str,
    draft_length: Any,
    exit_layers: int | None,
    preempted: bool,
) -> None:
    drafted = 0
    for start in (1,) if preempted else range(3):
        config = OfflineConfig(
            num_speculative_tokens=6,
            drafter=drafter,
            draft_length=draft_length,
            exit_layers=exit_layers,
            max_num_batched_tokens=48,
            preempt_every_step=preempted,
        )
        engine = OfflineEngine(target, config, num_blocks=200, draft=draft, measure=OddCosts(start))
        assert engine.run(submissions()) == plain
        engine.check_clean()
        assert engine.step.num_drafter_failures == 0
        drafted += sum(step.num_drafted for step in engine.steps)
    assert drafted > 10 or preempted  # under one curve alone it may never pay


def test_auto_uses_every_drafter_there_is(target: GenericExecutor, draft: GenericExecutor) -> None:
    """With the target as its own draft, which is always right, and a cost that lets it win."""
    twin = build_executor("llama", "bfloat16", vocab_size=VOCAB, plane_prefix=DRAFT_PLANES)

    def flat(executor: Executor, storage: KVStorage, max_rows: int) -> StepCost:
        return StepCost([(1, 1e-5), (64, 1e-5)] if executor is twin else [(1, 1e-3), (64, 1e-3)])

    config = OfflineConfig(num_speculative_tokens=6, drafter="auto", draft_length="auto")
    engine = Counting(target, config, num_blocks=200, draft=twin, measure=flat)
    sampled = SamplingParams(seed=1, temperature=1.0, max_tokens=150)  # nothing comes again
    looped = SamplingParams(seed=1, temperature=0.0, max_tokens=150)
    engine.run([Submission((5, 6, 7, 8), sampled)])
    assert engine.accepted["model"] > 80
    engine.run([Submission(tuple([5, 6, 7, 8] * 8), looped)])
    assert engine.accepted["ngram"] + engine.accepted["suffix"] > 20  # cheaper than the model where text repeats


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SpeculationConfig(drafter="model"), "draft_model"),
        (SpeculationConfig(drafter="medusa"), "unknown drafter 'medusa'"),
    ],
)
def test_a_drafter_that_cannot_be_had_is_refused(
    target: GenericExecutor, config: SpeculationConfig, message: str
) -> None:
    storage = KVStorage(target.planes, num_blocks=4, block_size=16)
    target.bind(storage)
    with pytest.raises(ValueError, match=message):
        build_speculation(config, executor=target, storage=storage, sampler=Sampler(), max_rows=16)
