"""The float32 head of a bfloat16 model: right, row by row, on torch and on the compiled kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import Kernels
from model.wide_head import WideHead
from tests.model.kernel_builders import need_kernels, random

VOCAB, WIDTH = 211, 48


def head(*, bias: bool) -> nn.Linear:
    linear = nn.Linear(WIDTH, VOCAB, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(random(VOCAB, WIDTH, seed=1))
        if bias:
            linear.bias.copy_(random(VOCAB, seed=2))
    return linear.to(torch.bfloat16)


def kernels_of(path: str) -> Kernels | None:
    return need_kernels() if path == "kernels" else None


def rows(count: int) -> Tensor:
    return random(1, count, WIDTH, dtype=torch.bfloat16, seed=3)


@pytest.mark.parametrize("path", ["torch", "kernels"])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_logits_are_float32_products_of_the_bfloat16_numbers(path: str, bias: bool) -> None:
    linear = head(bias=bias)
    expected = rows(5).double() @ linear.weight.double().T + (linear.bias.double() if bias else 0.0)
    WideHead(linear, kernels_of(path))
    logits = linear(rows(5))
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-4)


@torch.inference_mode()
def test_a_row_on_the_kernels_has_the_bits_of_the_row_alone() -> None:
    linear = head(bias=True)
    WideHead(linear, need_kernels())
    together = linear(rows(17))
    assert all(torch.equal(linear(rows(17)[:, i : i + 1])[0, 0], together[0, i]) for i in range(17))


@pytest.mark.parametrize("path", ["torch", "kernels"])
@torch.inference_mode()
def test_the_wanted_rows_have_the_bits_that_they_have_among_all(path: str) -> None:
    linear = head(bias=False)
    wide = WideHead(linear, kernels_of(path))
    every = linear(rows(16))
    wide.rows = 3
    assert torch.equal(linear(rows(16))[:, :3], every[:, :3])
    wide.rows = 0
    assert linear(rows(16)).shape == (1, 16, VOCAB)
    assert not linear(rows(16)).any()


@torch.inference_mode()
def test_a_comparison_may_leave_the_kernels_out() -> None:
    linear = head(bias=False)
    wide = WideHead(linear, need_kernels())
    wide.plain = True
    assert torch.equal(linear(rows(16)), F.linear(rows(16).float(), linear.weight.float()))
