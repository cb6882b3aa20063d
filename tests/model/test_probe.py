"""The exactness probe: the level is measured, and a batch-dependent executor is found out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvcache.storage import KVStorage
from model.batch import PackedBatch
from model.generic import GenericExecutor
from model.interface import ForwardOutput
from model.probe import probe_exactness
from tests.model.families import build_executor
from tests.model.packing import Packing


class Disturbed:
    """An executor whose logits change in the last bit where ``when(batch)``."""

    def __init__(self, inner: GenericExecutor, when) -> None:
        self._inner, self._when = inner, when
        self.info, self.kind, self.planes, self.bind = inner.info, inner.kind, inner.planes, inner.bind

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        out = self._inner.forward(batch, capture_layers=capture_layers)
        rows = self._when(batch)
        if not len(out.logits) or rows is None:
            return out
        logits = out.logits.clone()
        logits[rows] = torch.nextafter(logits[rows], torch.tensor(float("inf")))
        return dataclasses.replace(out, logits=logits)


@pytest.fixture(scope="module")
def executor() -> GenericExecutor:
    return build_executor("llama", "bfloat16", max_position_embeddings=96)  # a short context keeps the probe short


@pytest.mark.parametrize(("dtype", "context"), [("bfloat16", 512), ("float32", 96)])
def test_a_row_invariant_executor_is_l0(dtype: str, context: int) -> None:
    report = probe_exactness(build_executor("qwen3", dtype, max_position_embeddings=context), budget=80)
    assert report.level == "L0"
    assert all(check.passed for check in report.checks)
    assert report.tile_classes[0] == 16


@pytest.mark.parametrize(
    "when",
    [
        lambda batch: slice(None) if batch.num_rows == 1 else None,
        lambda batch: slice(None) if batch.num_rows >= 80 else None,
        lambda batch: slice(None) if batch.num_rows == 13 else None,
        lambda batch: 11 if batch.num_rows == 15 else None,
        lambda batch: -1 if int(batch.positions[-1]) == 66 and batch.num_rows > 1 else None,
    ],
    ids=["one row", "the budget", "some count of rows", "one place in a tile", "one position"],
)
def test_one_bit_that_depends_on_the_batch_makes_it_l2(executor: GenericExecutor, when) -> None:
    report = probe_exactness(Disturbed(executor, when), budget=80)
    assert report.level == "L2"
    assert "differ" in report.detail


def test_nan_logits_are_not_l0(executor: GenericExecutor) -> None:
    class Broken(Disturbed):
        def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
            out = self._inner.forward(batch)
            return dataclasses.replace(out, logits=out.logits * float("nan"))

    assert probe_exactness(Broken(executor, None), budget=20).level == "L2"


def test_the_storage_of_the_caller_is_bound_again(executor: GenericExecutor) -> None:
    packing = Packing(executor, [5])
    before = packing.run((0, [1, 2, 3, 4, 5], 0)).logits
    probe_exactness(executor, packing.storage, budget=20)
    assert torch.equal(packing.run((0, [5], 4)).logits[0], before[4])


def test_a_larger_tile_is_used_only_if_it_has_the_bits_of_the_base_tile() -> None:
    executor = build_executor("llama", "bfloat16", max_position_embeddings=64)
    assert probe_exactness(executor, budget=64).tile_classes == (16, 64)
    head = executor.structure.layers[-1]
    head.register_forward_hook(lambda m, args, out: out * (1.01 if out.shape[1] == 64 else 1.0))
    assert probe_exactness(executor, budget=64).tile_classes == (16,)
    assert executor.tile_classes == (16,)


def test_a_context_shorter_than_the_probe_is_enough() -> None:
    assert probe_exactness(build_executor("llama", max_position_embeddings=4), budget=512).level == "L0"


def test_a_storage_is_never_written_outside_of_the_probe(executor: GenericExecutor) -> None:
    storage = KVStorage(executor.planes, num_blocks=4, block_size=16)
    probe_exactness(executor, storage, budget=20)
    assert all(not storage.plane(name).any() for name in storage.names)
