"""Int8 products: the whole numbers are right on both paths, the paths agree to the bit, and no row looks at another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import model.kernels
from model.errors import ModelError
from model.int8 import GROUP, Int8Linear, Int8Weight, quantize_rows, quantize_weight
from tests.model.kernel_builders import DTYPES, need_kernels, random

PATHS = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
SHAPES = [(32, 64), (100, 77), (33, 576), (7, 1), (65, 1537)]  # (columns, k)


def multiply(
    rows: Tensor, weight: Int8Weight, bias: Tensor | None = None, *, kernels: bool, threads: int = 1
) -> Tensor:
    """``rows`` ``[T, k]`` on one of the paths."""
    if kernels:
        compiled = need_kernels()
        return compiled.int8_matmul(rows, compiled.pack(weight, bias), threads=threads)
    return Int8Linear(weight, bias)(quantize_rows(rows))


def draw_values(rows: int, k: int, kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "extreme":
        return rng.choice(np.array([-127, 127]), (rows, k))
    if kind == "all one sign":
        return np.full((rows, k), 127)
    return rng.integers(-127, 128, (rows, k)) * (rng.random((rows, k)) < 0.9)


KINDS = st.sampled_from(["extreme", "all one sign", "any"])


@PATHS
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 3000), KINDS, KINDS, st.integers(0, 9))
@example(2, 40, 4097, "all one sign", "all one sign", 0)
@example(13, 33, 1025, "extreme", "all one sign", 1)
def test_sums_are_those_of_int64(
    kernels: bool, count: int, columns: int, k: int, of_rows: str, of_weight: str, seed: int
) -> None:
    rows, weight = draw_values(count, k, of_rows, seed), draw_values(columns, k, of_weight, seed + 100)
    rows[:, ::GROUP] = 127  # so these whole numbers quantise to themselves, with scales of 1
    packed = Int8Weight(torch.from_numpy(weight).to(torch.int8), torch.ones(columns))
    found = multiply(torch.from_numpy(rows).float(), packed, kernels=kernels)
    expected = np.zeros((count, columns), np.float32)
    for first in range(0, k, GROUP):
        part = slice(first, first + GROUP)
        expected += (rows[:, part].astype(np.int64) @ weight[:, part].astype(np.int64).T).astype(np.float32)
    assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_kernels_and_torch_give_the_same_bits(dtype: torch.dtype, columns: int, k: int) -> None:
    weight, bias = quantize_weight(random(columns, k)), random(columns, seed=2)
    rows = random(29, k, dtype=dtype, seed=1)
    for bias_or_none in (bias, None):
        found, expected = (multiply(rows, weight, bias_or_none, kernels=kernels) for kernels in (True, False))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_and_torch_quantise_rows_to_the_same_values(dtype: torch.dtype) -> None:
    rows = random(40, 333, dtype=dtype) * torch.logspace(-38, 38, 40)[:, None].to(dtype)
    rows[3] = 0.0
    rows[4, 7] = float("inf")
    rows[5, 332] = float("nan")
    halves = torch.arange(333) % 127 + 0.5  # between two values: to the even one
    rows[6] = torch.where(torch.arange(333) == 9, 127.0, halves).to(dtype)
    expected = quantize_rows(rows)
    values, scales, offsets = need_kernels().quantize_rows(rows)
    assert torch.equal(values[:, :333], expected.values.view(40, -1)[:, :333])
    assert torch.equal(values[:, 333:], torch.zeros((40, 3), dtype=torch.int8))
    torch.testing.assert_close(scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(offsets, -128 * expected.values.sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_rows_are_near_and_symmetric(dtype: torch.dtype) -> None:
    rows = random(9, 3 * GROUP, dtype=dtype)
    found, negated = quantize_rows(rows), quantize_rows(-rows)
    assert bool((found.values.abs().amax(-1) == 127).all())
    error = (found.values.float() * found.scales[..., None] - rows.float().view(9, 3, GROUP)).abs()
    assert bool((error <= 0.5001 * found.scales[..., None]).all())
    assert torch.equal(negated.values, -found.values)
    assert torch.equal(negated.scales, found.scales)


def test_a_large_element_costs_its_own_group_alone_precision() -> None:
    rows = random(1, 3 * GROUP)
    expected = quantize_rows(rows)
    rows[0, GROUP] = 1000.0
    found = quantize_rows(rows)
    for group in (0, 2):
        assert torch.equal(found.values[0, group], expected.values[0, group])
        assert found.scales[0, group] == expected.scales[0, group]


@PATHS
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_row_is_bit_equal_alone_and_in_any_batch_at_any_place(kernels: bool, columns: int, k: int) -> None:
    weight, bias = quantize_weight(random(columns, k)), random(columns, seed=3)
    rows = random(250, k, seed=1) * torch.logspace(-3, 3, 250)[:, None]
    alone = torch.cat([multiply(rows[i : i + 1], weight, bias, kernels=kernels) for i in range(len(rows))])
    for count in (*range(1, 26), 239, 240, 241, 250):
        for threads in (1, 2) if kernels else (1,):
            found = multiply(rows[:count], weight, bias, kernels=kernels, threads=threads)
            assert torch.equal(found, alone[:count])
    for first in range(1, 14):  # the same rows, elsewhere in a tile
        found = multiply(rows[first : first + 25], weight, bias, kernels=kernels)
        assert torch.equal(found, alone[first : first + 25])


@PATHS
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(kernels: bool, odd: float) -> None:
    weight = quantize_weight(random(40, 64))
    rows = random(13, 64, seed=1)
    clean = multiply(rows, weight, kernels=kernels)
    rows[5, 17] = odd
    found = multiply(rows, weight, kernels=kernels)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], clean[:5])
    assert torch.equal(found[6:], clean[6:])


@PATHS
def test_a_row_of_zeros_gives_the_bias(kernels: bool) -> None:
    weight, bias = quantize_weight(random(40, 64)), random(40, seed=1)
    rows = torch.zeros((2, 64))
    rows[1, 3] = 1e-38  # counts as zero: 127 / 1e-38 is no float32
    assert torch.equal(multiply(rows, weight, bias, kernels=kernels), bias.expand(2, 40))


@PATHS
def test_a_column_of_zeros_gives_the_bias(kernels: bool) -> None:
    dense, bias = random(5, 64), random(5, seed=1)
    dense[2] = 0.0
    found = multiply(random(3, 64, seed=2), quantize_weight(dense), bias, kernels=kernels)
    assert torch.equal(found[:, 2], bias[2].expand(3))


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weight = random(4, 8)
    weight[1, 2] = float("inf")
    with pytest.raises(ModelError, match="the head holds values that are not finite"):
        quantize_weight(weight, "the head")


def test_weights_that_are_widened_at_each_use_give_the_same_bits() -> None:
    weight, rows = quantize_weight(random(9, 1100)), quantize_rows(random(3, 1100, seed=1))
    assert torch.equal(Int8Linear(weight, keep_wide=False)(rows), Int8Linear(weight)(rows))


def test_chosen_columns_have_the_bits_that_they_have_among_all() -> None:
    kernels = need_kernels()
    weight, bias, rows = quantize_weight(random(100, 70)), random(100, seed=1), random(5, 70, seed=2)
    columns = torch.tensor([0, 3, 31, 32, 64, 99])
    linear = Int8Linear(weight, bias)
    expected = linear(quantize_rows(rows))[:, columns]
    assert torch.equal(linear.select(columns)(quantize_rows(rows)), expected)
    assert torch.equal(kernels.int8_matmul(rows, kernels.select(kernels.pack(weight, bias), columns)), expected)


def test_rows_that_do_not_fit_the_weight_are_refused() -> None:
    kernels = need_kernels()
    weight = kernels.pack(quantize_weight(random(40, 64)))
    with pytest.raises(RuntimeError, match="do not fit a weight of 16 steps"):
        kernels.int8_matmul(random(2, 66), weight)


def test_the_kernels_have_the_same_groups() -> None:
    sources = (Path(model.kernels.__file__).parent / "csrc" / "rows.h").read_text()
    assert f"constexpr int64_t kGroup = {GROUP};" in sources
