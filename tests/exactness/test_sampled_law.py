"""The law of sampled tokens on the default model: its rows, many seeds each, and the whole engine against them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.offline import OfflineConfig, OfflineEngine, blocks_for
from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from model.kernels import get_kernels
from model.loader import LoadedModel
from specdec.params import SamplingParams
from tests.specdec.gtest import POWER, Family, worst_power
from tests.specdec.keyed import Floats, Seeds, pipeline_law, seed_range, uniforms_of, winners
from tests.specdec.laws import naive_law

pytestmark = pytest.mark.real_model

TEXT = "red green blue red green blue red green"  # an n-gram drafter has something to say
BASE = SamplingParams(seed=0, max_tokens=3)
CASES = {
    "min_p": dataclasses.replace(BASE, temperature=1.5, min_p=0.02),
    "top_k and top_p": dataclasses.replace(BASE, temperature=1.4, top_k=40, top_p=0.95),
    "penalties and bias": dataclasses.replace(
        BASE,
        repetition_penalty=1.3,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        logit_bias=((28, 2.0), (30, 1.0)),
        top_k=50,
        temperature=1.2,
    ),
    "temperature 1": BASE,
}
NUMBER = 2**16
BEST, LANES = 12, 4  # cells: the best tokens one by one, the others by id modulo LANES


@pytest.fixture(scope="module")
def prompt(smol_bf16: LoadedModel) -> list[int]:
    return smol_bf16.tokenizer.encode(TEXT, add_special_tokens=False)


def row_after(executor: Executor, tokens: list[int]) -> NDArray[np.float32]:
    """``[V]``: the raw logits that decide what follows ``tokens``."""
    storage = KVStorage(executor.planes, num_blocks=len(tokens), block_size=1)
    executor.bind(storage)
    span = RowSpan(tokens, 0, list(range(len(tokens))), len(tokens) - 1)
    batch = PackedBatch.build([span], block_size=1, scratch_block=storage.scratch_block)
    row: NDArray[np.float32] = executor.forward(batch).logits[0].numpy()
    return row


def cells_of(law: Floats) -> NDArray[np.int64]:
    """``[V]``: the cell of each token."""
    found: NDArray[np.int64] = BEST + np.arange(len(law)) % LANES
    found[np.argsort(-law)[:BEST]] = np.arange(BEST)
    return found


def tokens_of(seeds: Seeds, law: Floats, t: int) -> NDArray[np.int64]:
    """The keyed tokens under ``law`` [V] at output index ``t``."""
    kept = np.flatnonzero(law)
    return kept[winners(uniforms_of(seeds, t, kept), law[kept])]


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_one_row_follow_its_exact_law(
    name: str, smol_bf16: LoadedModel, prompt: list[int], family: Family
) -> None:
    row, params = row_after(smol_bf16.executor, prompt), CASES[name]
    law = np.array(naive_law(row.tolist(), params, prompt, len(prompt)))
    kernels = get_kernels()
    number = NUMBER
    if name != "temperature 1":
        tokens = tokens_of(seed_range(number), pipeline_law(row, params, prompt, len(prompt)), 0)
    elif kernels is not None:  # the whole vocabulary races
        rows = torch.from_numpy(np.tile(row, (256, 1)))
        seeds = torch.arange(number).view(-1, len(rows))
        ones, first = torch.ones(len(rows), dtype=torch.float64), torch.zeros(len(rows), dtype=torch.int64)
        tokens = np.concatenate([kernels.keyed_sample_rows(rows, ones, some, first).numpy() for some in seeds])
    else:
        number = 2**10  # 1.5 ms each in numpy: enough for an error of 0.16
        tokens = tokens_of(seed_range(number), law, 0)
    cells = cells_of(law)
    expected = np.bincount(cells, weights=law)
    if number == NUMBER:
        assert worst_power(expected, number) >= POWER
    assert not (law[tokens] == 0.0).any()
    family.follows(f"default model, {name}", np.bincount(cells[tokens], minlength=len(expected)), expected)


def test_the_engine_emits_the_keyed_tokens_of_the_models_rows(
    smol_bf16: LoadedModel, prompt: list[int], family: Family
) -> None:
    executor = smol_bf16.executor
    seeds = {name: seed_range(128 if name == "top_k and top_p" else 24, 2**62) for name in CASES}
    requests = [
        (prompt, dataclasses.replace(CASES[name], seed=seed, num_speculative_tokens=4 * (i % 2)))
        for name in CASES
        for i, seed in enumerate(seeds[name].tolist())
    ]
    engine = OfflineEngine(
        executor, OfflineConfig(max_num_batched_tokens=256), num_blocks=blocks_for(requests, 16, 4 + 16)
    )
    outputs = iter([answer.token_ids for answer in engine.generate(requests)])
    assert sum(step.num_drafted for step in engine.steps) > sum(step.num_accepted for step in engine.steps) > 0

    first_row = row_after(executor, prompt)
    later = 0
    for name, params in CASES.items():
        emitted = np.array([next(outputs) for _ in seeds[name]])
        law = np.array(naive_law(first_row.tolist(), params, prompt, len(prompt)))
        assert emitted[:, 0].tolist() == tokens_of(seeds[name], law, 0).tolist()
        if len(emitted) > 100:
            cells = cells_of(law)
            expected = np.bincount(cells, weights=law)
            family.follows("the engine's first tokens", np.bincount(cells[emitted[:, 0]], minlength=16), expected)
        for token, count in Counter(emitted[:, 0].tolist()).most_common(2):
            row = row_after(executor, [*prompt, token])
            given = np.array(naive_law(row.tolist(), params, [*prompt, token], len(prompt)))
            some = emitted[:, 0] == token
            assert emitted[some, 1].tolist() == tokens_of(seeds[name][some], given, 1).tolist()
            later += count
    assert later > len(requests) // 4
