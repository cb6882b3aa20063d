"""RMSNorm and rotary embedding with the K/V write, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.kernel_builders import DTYPES, need_kernels, random


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 45, 576])
def test_norm_equals_reference_and_each_row_is_alone(dtype: torch.dtype, n: int) -> None:
    kernels = need_kernels()
    x, weight = random(20, n), random(n, seed=1)
    found = kernels.rms_norm(x, weight, 1e-5, dtype)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(found, torch.cat([kernels.rms_norm(x[i : i + 1], weight, 1e-5, dtype) for i in range(20)]))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.double().chunk(2, dim=-1)
    c, s = angles.double().cos()[:, None], angles.double().sin()[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 3, 80), (4, 1, 20)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_rotates_queries_and_writes_keys_and_values_to_their_slots_only(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, normed: bool
) -> None:
    kernels = need_kernels()
    rows = 11
    qkv = random(rows, (heads + 2 * kv_heads) * dim)
    q_norm, k_norm = random(dim, seed=5).abs() + 0.5, random(dim, seed=6).abs() + 0.5
    table = torch.arange(40)[:, None] * torch.logspace(0, -3, dim // 2)[None, :]
    positions, slots = torch.arange(7, 7 + rows), torch.randperm(30, generator=torch.Generator().manual_seed(1))[:rows]
    planes = [torch.full((30, kv_heads, dim), -7.0, dtype=dtype) for _ in range(2)]
    norms = {"q_norm": q_norm, "k_norm": k_norm} if normed else {}
    found = kernels.rope_write(qkv, planes[0], planes[1], positions, slots, table.cos(), table.sin(), eps=1e-6, **norms)
    q, k, v = (part.view(rows, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1))
    if normed:
        q = q / (q.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * q_norm
        k = k / (k.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * k_norm
    tolerance = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), rotated(q, table[positions]), **tolerance)
    torch.testing.assert_close(planes[0][slots].double(), rotated(k, table[positions]), **tolerance)
    assert torch.equal(planes[1][slots], v.to(dtype))
    untouched = torch.ones(30, dtype=torch.bool)
    untouched[slots] = False
    assert all((plane[untouched] == -7.0).all() for plane in planes)


def test_slots_and_positions_outside_of_their_tables_are_refused() -> None:
    kernels = need_kernels()
    plane = torch.zeros(4, 1, 16)
    table = torch.zeros(8, 8)
    qkv = random(1, 3 * 16)
    with pytest.raises(RuntimeError, match=r"slots\[0\] = 4 is outside 0..3"):
        kernels.rope_write(qkv, plane, plane.clone(), torch.tensor([0]), torch.tensor([4]), table, table)
    with pytest.raises(RuntimeError, match=r"positions\[0\] = 8 is outside 0..7"):
        kernels.rope_write(qkv, plane, plane.clone(), torch.tensor([8]), torch.tensor([0]), table, table)
