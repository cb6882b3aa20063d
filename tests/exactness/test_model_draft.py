"""A draft model on real executors: it changes no bit of an answer, and the target as its own draft is never wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bench.offline import Completion, OfflineConfig, OfflineEngine, blocks_for
from kvcache.storage import DRAFT_PLANES
from model.interface import Executor
from model.loader import load_model
from specdec.draft_length.cost import StepCost
from tests.exactness.builders import Request, build_requests
from tests.exactness.tiny import TINY_MODELS, TinyModel, load_tiny

COST = StepCost([(1, 1e-3), (64, 2e-3)])
PLAIN = OfflineConfig(num_speculative_tokens=0)
DRAFTED = OfflineConfig(num_speculative_tokens=5, drafter="model")
NAMES = ["gemma2 generic fp32", "llama fused on torch bf16", "mistral bf16"]


@dataclass
class Twins:
    """One checkpoint, loaded as the target and as its draft."""

    target: Executor
    draft: Executor
    requests: list[Request]
    plain: list[Completion]


def run(executor: Executor, draft: Executor | None, config: OfflineConfig, requests: list[Request], batch: int = 6):
    """``requests`` twice, so that the second time finds prompts in the cache; the engine and all answers."""
    blocks = blocks_for(requests, config.block_size, config.num_speculative_tokens + config.block_size)
    engine = OfflineEngine(executor, config, num_blocks=blocks, draft=draft, measure=lambda *_: COST)
    answers: list[Completion] = []
    for _ in range(2):
        for first in range(0, len(requests), batch):
            answers += engine.generate(requests[first : first + batch])
    engine.check_clean()
    assert engine.step.num_drafter_failures == 0
    return engine, answers


def load(tiny: TinyModel, folder: Path) -> tuple[Executor, Executor]:
    target = load_tiny(tiny, folder)
    kernels = None if tiny.kernels else "torch"
    draft = load_model(folder, dtype=tiny.dtype, executor=tiny.executor, kernels=kernels, plane_prefix=DRAFT_PLANES)
    return target.executor, draft.executor


@pytest.fixture(scope="module", params=NAMES)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    tiny = TINY_MODELS[request.param]
    target, draft = load(tiny, tmp_path_factory.mktemp("tiny"))
    requests = build_requests(tiny.prompts()[2:14], 9, frozenset({9, 100}))
    _, plain = run(target, None, PLAIN, requests, batch=1)
    return Twins(target, draft, requests, plain)


@pytest.mark.parametrize(
    "config",
    [
        DRAFTED,
        replace(DRAFTED, block_size=4, max_num_batched_tokens=24, num_speculative_tokens=9),
        replace(DRAFTED, preempt_every_step=True),
        replace(DRAFTED, prefix_cache=False),
    ],
    ids=["", "small blocks and chunks", "preempted in every step", "without a prefix cache"],
)
def test_the_target_drafts_for_itself_without_a_rejection(twins: Twins, config: OfflineConfig) -> None:
    engine, answers = run(twins.target, twins.draft, config, twins.requests)
    assert answers == twins.plain
    drafted, accepted = (sum(getattr(s, f"num_{what}") for s in engine.steps) for what in ("drafted", "accepted"))
    assert accepted == drafted > 0
    if config.preempt_every_step:
        assert engine.num_preemptions > 0


def test_another_model_changes_no_bit_of_an_answer(tmp_path: Path) -> None:
    tiny = TINY_MODELS["mistral bf16"]
    target, _ = load(tiny, tmp_path / "target")
    _, draft = load(replace(TINY_MODELS["qwen2 bf16"], changes={"num_hidden_layers": 1}), tmp_path / "draft")
    requests = build_requests(tiny.prompts()[2:14], 9, frozenset({9, 100}))
    _, plain = run(target, None, PLAIN, requests, batch=1)
    for config in (DRAFTED, replace(DRAFTED, preempt_every_step=True)):
        engine, answers = run(target, draft, config, requests)
        assert answers == plain
        assert sum(s.num_accepted for s in engine.steps) < sum(s.num_drafted for s in engine.steps)
