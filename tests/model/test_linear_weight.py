"""Laid out weights: the same products, row by row, and a model that keeps its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model.linear_weight
from model.linear_weight import LaidOutLinears, LinearWeight, can_lay_out
from tests.model.families import build_executor
from tests.model.kernel_builders import random
from tests.model.packing import Packing

COLUMNS, WIDTH = 72, 48


def weight(dtype: torch.dtype) -> torch.Tensor:
    return random(COLUMNS, WIDTH, dtype=dtype, seed=1)


@pytest.mark.parametrize("laid_out", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_a_product_is_that_of_the_numbers_given(
    dtype: torch.dtype, bias: bool, laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not laid_out:
        monkeypatch.setattr(model.linear_weight, "_computes", lambda dtype: False)
    added = random(COLUMNS, dtype=dtype, seed=2) if bias else None
    x = random(2, 5, WIDTH, dtype=dtype, seed=3)
    linear = LinearWeight(weight(dtype), added)
    expected = F.linear(x.double(), weight(dtype).double(), None if added is None else added.double())
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    found = linear(x)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert linear.num_columns == COLUMNS


@torch.inference_mode()
def test_what_onednn_cannot_take_stays_as_it_is() -> None:
    assert not can_lay_out(weight(torch.float64))
    x = random(3, WIDTH, dtype=torch.float64, seed=3)
    assert torch.equal(LinearWeight(weight(torch.float64))(x), F.linear(x, weight(torch.float64)))


def test_a_model_keeps_its_weights_and_runs_its_own_code_when_told_to() -> None:
    stack = nn.Sequential(nn.Linear(WIDTH, COLUMNS), nn.Linear(COLUMNS, 4), nn.Linear(4, 4)).eval()
    x = random(3, WIDTH, seed=3)
    own = stack(x)
    linears = LaidOutLinears(stack, but=stack[2])
    in_use = ["forward" in layer.__dict__ for layer in stack]
    assert in_use == [can_lay_out(stack[0].weight), can_lay_out(stack[1].weight), False]
    assert torch.allclose(stack(x), own, atol=1e-5)
    linears.leave()
    assert torch.equal(stack(x), own)
    linears.use()
    assert ["forward" in layer.__dict__ for layer in stack] == in_use


def test_no_more_than_the_allowed_bytes_are_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    monkeypatch.setattr(model.linear_weight, "_SECOND_COPY_BYTES", 2 * 8 * 8 * 4)
    LaidOutLinears(stack)
    assert sum("forward" in layer.__dict__ for layer in stack) == (2 if can_lay_out(stack[0].weight) else 0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_comparison_with_the_models_own_code_leaves_the_laid_out_weights_alone(family: str) -> None:
    executor = build_executor(family, "bfloat16", max_position_embeddings=64)
    linears = [m for m in executor.model.modules() if type(m) is nn.Linear and m is not executor.structure.head]
    before = ["forward" in linear.__dict__ for linear in linears]
    with executor.own_code():
        assert not any("forward" in linear.__dict__ for linear in linears)
    assert ["forward" in linear.__dict__ for linear in linears] == before
    assert Packing(executor, [5]).run((0, [1, 2, 3, 4, 5], 0)).logits.isfinite().all()
