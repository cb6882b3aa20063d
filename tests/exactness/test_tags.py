"""What attention really reads, decoded from its output: every row, every position of its context, the right token."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.offline import OfflineConfig, blocks_for
from model.batch import PackedBatch
from model.kernels import find_kernels
from specdec.params import SamplingParams
from tests.exactness.builders import shuffle_blocks
from tests.exactness.tags import VOCAB, Backend, Compiled, TagEngine, TagExecutor, Torch, next_token

PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=12)
COMMON = [(7 * i) % VOCAB for i in range(20)]  # all prompts begin alike: prefix hits, at small block sizes
PROMPTS = [COMMON[:1], [*COMMON[:9], 5], [*COMMON, 1, 2, 3], [*COMMON, *range(110)]]  # the last crosses a chunk


def torch_bf16() -> Backend:
    return Torch(torch.bfloat16)


def compiled(dtype: torch.dtype) -> Backend:
    kernels, reason = find_kernels()
    if kernels is None:
        pytest.skip(f"no compiled kernels: {reason}")
    return Compiled(kernels, dtype)


BACKENDS = {
    "torch bf16": torch_bf16,
    "kernels bf16": lambda: compiled(torch.bfloat16),
    "kernels fp32": lambda: compiled(torch.float32),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]()


def run(executor: TagExecutor, config: OfflineConfig, *, shuffle: int = 1, times: int = 1) -> TagEngine:
    """All prompts together; the answers must be the target's own."""
    requests = [(prompt, PARAMS) for prompt in PROMPTS]
    lookahead = config.num_speculative_tokens + config.block_size
    engine = TagEngine(executor, config, num_blocks=blocks_for(requests, config.block_size, lookahead))
    shuffle_blocks(engine.manager, shuffle)
    for _ in range(times):
        for prompt, answer in zip(PROMPTS, engine.generate(requests), strict=True):
            tokens = list(prompt)
            for token in answer.token_ids:
                assert token == next_token(tokens, executor.window)
                tokens.append(token)
    engine.check_clean()
    assert engine.compared > sum(map(len, PROMPTS))
    return engine


def config(**changes: object) -> OfflineConfig:
    return replace(OfflineConfig(num_speculative_tokens=5, ledger=False), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_every_row_reads_its_own_context(backend: Backend, block_size: int) -> None:
    """In small chunks, with drafts accepted and rejected (more of them than fit a block of 1 or 4)."""
    engine = run(TagExecutor(backend), config(block_size=block_size, max_num_batched_tokens=45))
    assert engine.accepted >= {0, 1, 5}
    assert sum(step.rollback_tokens for step in engine.steps) > 0


@pytest.mark.parametrize("window", [1, 9, 40])
def test_a_sliding_window_ends_where_it_should(backend: Backend, window: int) -> None:
    run(TagExecutor(backend, window=window), config(block_size=4))


def test_a_prefix_hit_reads_what_another_sequence_wrote(backend: Backend) -> None:
    engine = run(TagExecutor(backend), config(block_size=4, max_num_batched_tokens=64), times=2)
    assert engine.foreign > 0


def test_preemption_at_every_step(backend: Backend) -> None:
    engine = run(TagExecutor(backend), config(block_size=4, preempt_every_step=True))
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_pattern_of_right_and_wrong_drafts(k: int) -> None:
    engine = run(TagExecutor(torch_bf16()), config(num_speculative_tokens=k, block_size=2))
    assert engine.patterns.patterns >= set(itertools.product((True, False), repeat=k))
    assert engine.accepted == set(range(k + 1))


def test_the_ledger_says_what_the_planes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot by slot, after every step: accepted, rejected, shared, evicted and written again."""
    executor = TagExecutor(torch_bf16())
    compared = 0

    def look(engine: TagEngine) -> None:
        nonlocal compared
        ledger = engine.ledger
        assert ledger is not None
        record = np.stack([ledger._writer, ledger._position, ledger._token], axis=1)
        held = engine.storage.plane("tags").numpy()[: len(record)]
        np.testing.assert_array_equal(record, held)
        compared += int((record[:, 0] >= 0).sum())

    monkeypatch.setattr(TagEngine, "after_step", look)
    run(executor, config(block_size=4, max_num_batched_tokens=45, ledger=True), times=2)
    assert compared > 1000


@pytest.mark.parametrize("what", ["block_tables", "slot_mapping", "positions"])
def test_one_wrong_number_in_a_batch_is_seen(backend: Backend, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend has teeth: no ledger is on here."""
    executor = TagExecutor(backend)
    forward = executor.forward
    spoiled = []

    def spoil(batch: PackedBatch) -> object:
        if not spoiled and int(batch.positions[batch.row_starts[-2]]) > 100:
            spoiled.append(what)
            if what == "block_tables":
                batch.block_tables[-1, 3] = batch.block_tables[-1, 2]
            elif what == "slot_mapping":
                batch.slot_mapping[-1] = batch.slot_mapping[-1] - 1
            else:
                batch.positions[batch.row_starts[-2] :] -= 1
        return forward(batch)

    monkeypatch.setattr(executor, "forward", spoil)
    with pytest.raises(AssertionError):
        run(executor, config(block_size=4))
    assert spoiled
