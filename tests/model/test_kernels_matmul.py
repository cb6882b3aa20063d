"""The packed matrix product: right, and each row independent of every other."""

from __future__ import annotations

import pytest
import torch

from model.kernels.ops import PackedWeight
from tests.model.kernel_builders import DTYPES, need_kernels, random

SHAPES = [(32, 64), (100, 77), (33, 576), (7, 1), (96, 1536)]  # (columns, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_product_equals_float64_reference(dtype: torch.dtype, columns: int, k: int) -> None:
    kernels = need_kernels()
    weight, rows, bias = random(columns, k, dtype=dtype), random(29, k, dtype=dtype, seed=1), random(columns, seed=2)
    found = kernels.matmul(rows, kernels.pack(weight, bias))
    expected = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * k**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "k"), SHAPES)
def test_row_is_bit_equal_alone_and_in_any_batch_at_any_place(dtype: torch.dtype, columns: int, k: int) -> None:
    kernels = need_kernels()
    weight = kernels.pack(random(columns, k, dtype=dtype), random(columns, seed=3))
    rows = random(300, k, dtype=dtype, seed=1)
    alone = torch.cat([kernels.matmul(rows[i : i + 1], weight, threads=1) for i in range(len(rows))])
    for count in (*range(1, 41), 239, 240, 241, 300):
        for threads in (1, 2):
            assert torch.equal(kernels.matmul(rows[:count], weight, threads=threads), alone[:count])
    for first in range(1, 14):  # the same rows, elsewhere in a tile
        assert torch.equal(kernels.matmul(rows[first : first + 25], weight), alone[first : first + 25])


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_and_strided_rows_change_nothing(dtype: torch.dtype) -> None:
    kernels = need_kernels()
    weight = kernels.pack(random(64, 70, dtype=dtype))
    wide = random(9, 90, dtype=dtype, seed=1)
    for offset in range(20):
        view = wide[:, offset : offset + 70]
        assert torch.equal(kernels.matmul(view, weight), kernels.matmul(view.clone(), weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(16, 32), (50, 77), (67, 45)])
def test_gated_product_is_silu_of_gate_times_up(dtype: torch.dtype, m: int, k: int) -> None:
    kernels = need_kernels()
    gate, up = random(m, k, dtype=dtype), random(m, k, dtype=dtype, seed=1)
    gate_bias, up_bias = random(m, seed=4), random(m, seed=5)
    rows = random(31, k, dtype=dtype, seed=2)
    weight = kernels.pack_gated(torch.cat([gate, up]), torch.cat([gate_bias, up_bias]))
    found = kernels.gated_matmul(rows, weight)
    g, u = rows.double() @ gate.double().T + gate_bias, rows.double() @ up.double().T + up_bias
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), torch.nn.functional.silu(g) * u, rtol=tolerance, atol=tolerance)
    alone = torch.cat([kernels.gated_matmul(rows[i : i + 1], weight, threads=1) for i in range(31)])
    assert torch.equal(found, alone)


def test_nan_in_one_row_stays_in_that_row() -> None:
    kernels = need_kernels()
    weight = kernels.pack(random(40, 64, dtype=torch.bfloat16))
    rows = random(13, 64, dtype=torch.bfloat16, seed=1)
    clean = kernels.matmul(rows, weight)
    rows[5] = float("nan")
    found = kernels.matmul(rows, weight)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], clean[:5])
    assert torch.equal(found[6:], clean[6:])


def test_rows_that_do_not_fit_the_weight_are_refused() -> None:
    kernels = need_kernels()
    weight = kernels.pack(random(40, 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="do not fit a weight of 32 steps"):
        kernels.matmul(random(2, 66, dtype=torch.bfloat16), weight)
    with pytest.raises(RuntimeError, match="rows must be BFloat16"):
        kernels.matmul(random(2, 64), weight)
    with pytest.raises(RuntimeError, match="columns 90 do not fit 2 tiles"):
        kernels.matmul(random(2, 64, dtype=torch.bfloat16), PackedWeight(weight.data, 90, None))
