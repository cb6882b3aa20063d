"""Paged attention: right, and each row independent of everything but its own context."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.kernel_builders import DTYPES, PagedLayer, attend, need_kernels, random, reference_attention

# (heads, KV heads, head size): group sizes 1, 3, 4, 8; head sizes that fill no vector evenly
GEOMETRIES = [(2, 2, 64), (6, 2, 80), (3, 1, 96), (4, 1, 128), (8, 1, 20)]
CONTEXTS = (1, 63, 64, 65, 200)
OPTIONS: list[dict[str, float]] = [{}, {"window": 50}, {"softcap": 20.0}, {"window": 7, "softcap": 5.0}]


def contents(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Queries, keys and values of every position of each sequence."""
    queries = [random(n, heads, dim, dtype=dtype, seed=3 * s) for s, n in enumerate(CONTEXTS)]
    keys = [random(n, kv_heads, dim, dtype=dtype, seed=3 * s + 1) for s, n in enumerate(CONTEXTS)]
    values = [random(n, kv_heads, dim, dtype=dtype, seed=3 * s + 2) for s, n in enumerate(CONTEXTS)]
    return [queries, keys, values]


def rows_of(queries: list[Tensor], rows: list[tuple[int, int, int]]) -> Tensor:
    return torch.cat([queries[s][at : at + n] for s, at, n in rows])


def last_rows() -> list[tuple[int, int, int]]:
    return [(s, max(0, n - 5), min(5, n)) for s, n in enumerate(CONTEXTS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_equals_float64_reference(
    dtype: torch.dtype, geometry: tuple[int, int, int], options: dict[str, float]
) -> None:
    kernels = need_kernels()
    queries, keys, values = contents(*geometry, dtype)
    layer = PagedLayer.build(keys, values, block_size=16)
    rows = last_rows()
    found = attend(kernels, rows_of(queries, rows), layer, layer.batch(rows), threads=2, **options)
    expected = torch.stack(
        [
            reference_attention(queries[s][p], keys[s], values[s], p, **options)  # type: ignore[arg-type]
            for s, at, n in rows
            for p in range(at, at + n)
        ]
    )
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_row_is_bit_equal_at_any_batch_chunking_threads_and_block_size(
    dtype: torch.dtype, geometry: tuple[int, int, int], options: dict[str, float]
) -> None:
    kernels = need_kernels()
    queries, keys, values = contents(*geometry, dtype)
    alone: dict[tuple[int, int], Tensor] = {}
    layer = PagedLayer.build(keys, values, block_size=16)
    longest = len(CONTEXTS) - 1
    positions = [(s, p) for s, at, n in last_rows() for p in range(at, at + n)]
    for s, p in positions:
        alone[s, p] = attend(kernels, queries[s][p : p + 1], layer, layer.batch([(s, p, 1)]), **options)[0]
    for block_size in (1, 4, 16, 64):
        other = PagedLayer.build(keys, values, block_size=block_size, seed=block_size)
        for rows in (last_rows(), last_rows()[::-1], [(longest, 0, CONTEXTS[longest])], [(longest, 197, 2), (0, 0, 1)]):
            for threads in (1, 2):
                found = attend(kernels, rows_of(queries, rows), other, other.batch(rows), threads=threads, **options)
                index = 0
                for s, at, n in rows:
                    for p in range(at, at + n):
                        if (s, p) in alone:
                            assert torch.equal(found[index], alone[s, p]), (block_size, rows, threads, s, p)
                        index += 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_what_lies_behind_the_row_and_in_foreign_slots_changes_nothing(
    dtype: torch.dtype, options: dict[str, float]
) -> None:
    kernels = need_kernels()
    queries, keys, values = contents(6, 2, 80, dtype)
    poisoned_keys, poisoned_values = [k.clone() for k in keys], [v.clone() for v in values]
    for s, n in enumerate(CONTEXTS):  # the newest position of each sequence is not written yet
        if n > 1:
            poisoned_keys[s][n - 1] = poisoned_values[s][n - 1] = float("nan")
    clean = PagedLayer.build(keys, values, block_size=16, poison=0.0)
    poisoned = PagedLayer.build(poisoned_keys, poisoned_values, block_size=16, poison=float("nan"), seed=9)
    rows = [(s, max(0, n - 4), 3) for s, n in enumerate(CONTEXTS) if n > 4]
    query = rows_of(queries, rows)
    for threads in (1, 2):
        found = attend(kernels, query, poisoned, poisoned.batch(rows), threads=threads, **options)
        assert not found.isnan().any()
        assert torch.equal(found, attend(kernels, query, clean, clean.batch(rows), threads=threads, **options))


def test_what_lies_before_the_window_changes_nothing() -> None:
    kernels = need_kernels()
    queries, keys, values = contents(3, 1, 96, torch.bfloat16)
    last = len(CONTEXTS) - 1
    rows = [(last, 195, 5)]
    clean = PagedLayer.build(keys, values, block_size=4)
    expected = attend(kernels, rows_of(queries, rows), clean, clean.batch(rows), window=20)
    keys[last][: 195 - 19] = values[last][: 195 - 19] = float("nan")
    poisoned = PagedLayer.build(keys, values, block_size=4)
    assert torch.equal(attend(kernels, rows_of(queries, rows), poisoned, poisoned.batch(rows), window=20), expected)


def test_huge_scores_do_not_overflow() -> None:
    kernels = need_kernels()
    queries, keys, values = contents(2, 2, 64, torch.float32)
    layer = PagedLayer.build([k * 1e3 for k in keys], values, block_size=16)
    rows = last_rows()
    found = attend(kernels, rows_of(queries, rows) * 1e3, layer, layer.batch(rows))
    assert found.isfinite().all()


def test_blocks_outside_of_the_storage_are_refused() -> None:
    kernels = need_kernels()
    queries, keys, values = contents(2, 2, 64, torch.bfloat16)
    layer = PagedLayer.build(keys, values, block_size=16)
    rows = [(2, 63, 1)]
    batch = layer.batch(rows)
    batch.block_tables[0, 1] = 1000
    with pytest.raises(RuntimeError, match=r"block_tables\[0\]\[1\] = 1000 is outside"):
        attend(kernels, rows_of(queries, rows), layer, batch)
