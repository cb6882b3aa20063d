"""The target as its own draft model: greedy, every draft is accepted, because verify rows equal decode rows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest

from bench.offline import OfflineConfig, blocks_for, run_offline
from model.interface import Executor
from specdec.drafters.base import DraftRequest
from specdec.params import SamplingParams
from specdec.sequence import Sequence
from tests.exactness.builders import CheckedEngine
from tests.exactness.conditions import REFERENCE
from tests.exactness.tiny import TINY_MODELS, load_tiny

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=9, logprobs=1)
K = 5


class SelfDrafter:
    """Proposes what ``executor`` decodes greedily, one token at a time, from a cold cache."""

    name = "self"

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def propose(self, requests: Seq[DraftRequest]) -> list[list[int]]:
        asked = [(request.sequence.tokens, replace(GREEDY, max_tokens=request.max_drafts)) for request in requests]
        return [list(answer.token_ids) for answer in run_offline(self._executor, REFERENCE.config, asked, batch=1)]

    def update(self, sequence: Sequence, num_emitted: int) -> None:
        pass

    def release(self, seq_id: int) -> None:
        pass


@pytest.mark.case("V 8783")
@pytest.mark.parametrize("name", ["llama fused on torch bf16", "mistral bf16", "qwen3 fp32"])
def test_the_target_accepts_all_of_its_own_drafts(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    target, twin = (load_tiny(TINY_MODELS[name], tmp_path_factory.mktemp("twin")).executor for _ in range(2))
    requests = [(prompt, GREEDY) for prompt in TINY_MODELS[name].prompts()[1:8:3]]
    expected = run_offline(target, REFERENCE.config, requests, batch=1)
    config = OfflineConfig(num_speculative_tokens=K, block_size=4)
    engine = CheckedEngine(target, config, num_blocks=blocks_for(requests, 4, K + 4), drafter=SelfDrafter(twin))
    assert engine.generate(requests) == expected
    drafted = sum(step.num_drafted for step in engine.steps)
    assert sum(step.num_accepted for step in engine.steps) == drafted > 0
    assert sum(step.rollback_tokens for step in engine.steps) == 0
