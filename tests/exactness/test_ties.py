"""Planted exact ties: tokens v and v + 100 have the same weights in the head, so their logits are equal, bit for bit.

Greedy takes the lower one, on every path that computes or compares logits, in decode rows and in verify rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from bench.offline import Completion, OfflineConfig, blocks_for, run_offline
from model.interface import Executor
from specdec.drafters.synthetic import OracleDrafter, RandomDrafter, WrongDrafter
from specdec.params import SamplingParams
from tests.exactness.builders import CheckedEngine
from tests.exactness.conditions import REFERENCE
from tests.exactness.tiny import TINY_MODELS, VOCAB, load_tiny

TWIN = 100
BASE = SamplingParams(seed=0, temperature=0.0, max_tokens=7, logprobs=2)
# Through the row path, the state path (a bias that changes nothing) and the batch call of kernels.
PARAMS = (BASE, replace(BASE, logit_bias=((205, 0.0),)), replace(BASE, min_tokens=2))
K = 5


def _plant(model: PreTrainedModel) -> None:
    weight = model.get_output_embeddings().weight
    weight[TWIN : 2 * TWIN] = weight[:TWIN]


def _check_ties(answers: list[Completion]) -> None:
    ties = 0
    for answer in answers:
        assert not any(TWIN <= token < 2 * TWIN for token in answer.token_ids), answer.token_ids
        for entry in answer.logprobs:
            (best, first), (second, equal) = entry.top
            if second == best + TWIN and best < TWIN:
                assert first == equal
                ties += 1
    assert ties > 5


@pytest.mark.case("V 42960")
@pytest.mark.parametrize("name", ["llama generic bf16", "llama fused on torch bf16", "mistral bf16", "qwen3 fp32"])
def test_the_lowest_id_wins_with_and_without_drafts(name: str, tmp_path: Path) -> None:
    tiny = replace(TINY_MODELS[name], prepare=_plant)
    executor: Executor = load_tiny(tiny, tmp_path).executor
    requests = [(prompt, PARAMS[i % len(PARAMS)]) for i, prompt in enumerate(tiny.prompts()[2:8])]
    plain = run_offline(executor, REFERENCE.config, requests, batch=1)
    _check_ties(plain)
    known = {i: answer.token_ids for i, answer in enumerate(plain)}
    # The twin's id is what a drafter with another rule for ties would propose.
    twins = {i: [t + TWIN if t < TWIN else t for t in ids] for i, ids in known.items()}
    for drafter in (
        WrongDrafter(OracleDrafter(known), 1, VOCAB, error_rate=0.2),
        OracleDrafter(twins),
        RandomDrafter(1, VOCAB),
    ):
        config = OfflineConfig(num_speculative_tokens=K)
        engine = CheckedEngine(executor, config, num_blocks=blocks_for(requests, 16, K + 16), drafter=drafter)
        assert engine.generate(requests) == plain
