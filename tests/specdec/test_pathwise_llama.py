"""Level 0 through the real executors, on a tiny random llama."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model.interface import Executor
from model.loader import load_model
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.synthetic import OracleDrafter, RandomDrafter, WrongDrafter
from specdec.params import SamplingParams
from tests.model.checkpoints import write_folder
from tests.specdec.builders import Result, alone, outputs, prompts

BASE = SamplingParams(seed=3, max_tokens=14, logprobs=2)
PARAMS = [
    replace(BASE, temperature=0.0),
    replace(BASE, temperature=1.0),
    replace(BASE, temperature=0.8, top_p=0.9, frequency_penalty=1.0, repetition_penalty=1.1),
    replace(BASE, temperature=0.0, presence_penalty=2.0),
]


def facts(result: Result) -> tuple[object, ...]:
    return (result.token_ids, result.logprobs, result.finish_reason)


@pytest.fixture(scope="module", params=["generic", "fused"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    folder = write_folder(tmp_path_factory.mktemp("llama"))
    home = tmp_path_factory.mktemp("home")
    loaded = load_model(folder, executor=request.param, home=home, max_batched_tokens=64)
    assert request.param in loaded.executor.kind
    return loaded.executor


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_speculation_on_equals_off_on_a_real_model(executor: Executor, block_size: int) -> None:
    vocab = executor.info.vocab_size
    texts = prompts(len(PARAMS), vocab=vocab)
    truth = [alone(p, params, executor=executor) for p, params in zip(texts, PARAMS, strict=True)]
    known = OracleDrafter({i: result.token_ids for i, result in enumerate(truth)})
    drafters = (
        (NgramDrafter(vocab_size=vocab), 4),
        (RandomDrafter(0, vocab), 3),
        (known, 8),
        (WrongDrafter(known, 1, vocab, error_rate=0.3), 6),
    )
    for drafter, k in drafters:
        found = outputs(texts, PARAMS, executor=executor, drafter=drafter, k=k, block_size=block_size, poison=True)
        for seq_id, expected in enumerate(truth):
            assert facts(found[seq_id]) == facts(expected), (drafter.name, k, seq_id)
