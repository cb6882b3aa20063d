"""Row i of a verify forward is bit-equal to the one-row decode of that token, layer by layer."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.interface import Executor
from tests.exactness.builders import Subject

BLOCK = 8
ROWS = 9


def _forward(executor: Executor, storage: KVStorage, spans: list[RowSpan]) -> tuple[Tensor, Tensor]:
    batch = PackedBatch.build(spans, block_size=BLOCK, scratch_block=storage.scratch_block)
    out = executor.forward(batch, capture_layers=True)
    assert out.layers is not None
    return out.logits, out.layers


@pytest.mark.parametrize("beside", [0, 3, 7])
@pytest.mark.case("V 54506")
def test_a_verify_row_is_the_one_row_decode(subject: Subject, beside: int) -> None:
    executor = subject.executor
    prompts = [prompt for prompt, _ in subject.requests]
    prompts = [(prompt * 20)[: 20 + 13 * i] for i, prompt in enumerate(prompts[: beside + 1])]
    per_sequence = -(-max(len(prompt) for prompt in prompts) // BLOCK)
    storage = KVStorage(executor.planes, num_blocks=per_sequence * len(prompts), block_size=BLOCK)
    executor.bind(storage)
    blocks = list(range(storage.num_blocks))
    random.Random(beside).shuffle(blocks)
    tables = [blocks[i * per_sequence : (i + 1) * per_sequence] for i in range(len(prompts))]

    for prompt, table in zip(prompts, tables, strict=True):  # everything but the last rows
        _forward(executor, storage, [RowSpan(prompt[:-ROWS], 0, table, len(prompt) - ROWS)])
    spans = [
        RowSpan(prompt[-ROWS:], len(prompt) - ROWS, table, 0) for prompt, table in zip(prompts, tables, strict=True)
    ]
    logits, layers = _forward(executor, storage, spans)

    for s, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
        for i in range(ROWS):
            position = len(prompt) - ROWS + i
            alone, alone_layers = _forward(executor, storage, [RowSpan([prompt[position]], position, table, 0)])
            row = s * ROWS + i
            for layer in range(executor.info.num_layers):
                assert torch.equal(layers[layer, row], alone_layers[layer, 0]), (s, i, layer)
            assert torch.equal(logits[row], alone[0]), (s, i)
