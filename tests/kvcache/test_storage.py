"""KVStorage: planes of slots under one block table, and their sizes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.storage import KVStorage, PlaneSpec, blocks_in_budget, bytes_per_block

PLANES = (PlaneSpec("target.0.k", (2, 3), torch.bfloat16), PlaneSpec("target.0.v", (2, 5), torch.float32))

planes = st.lists(
    st.builds(
        PlaneSpec,
        name=st.text("abc", min_size=1, max_size=4),
        shape=st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple),
        dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda plane: plane.name,
)


@given(specs=planes, num_blocks=st.integers(1, 5), block_size=st.integers(1, 8))
def test_every_plane_has_all_slots_and_one_scratch_block(
    specs: list[PlaneSpec], num_blocks: int, block_size: int
) -> None:
    storage = KVStorage(specs, num_blocks=num_blocks, block_size=block_size)
    assert storage.names == tuple(spec.name for spec in specs)
    assert storage.scratch_block == num_blocks
    for spec in specs:
        plane = storage.plane(spec.name)
        assert plane.shape == ((num_blocks + 1) * block_size, *spec.shape)
        assert plane.dtype == spec.dtype
        assert not plane.any()
        assert plane.is_contiguous()


@given(specs=planes, num_blocks=st.integers(1, 5), block_size=st.integers(1, 8))
def test_memory_is_what_the_sizes_say(specs: list[PlaneSpec], num_blocks: int, block_size: int) -> None:
    storage = KVStorage(specs, num_blocks=num_blocks, block_size=block_size)
    allocated = sum(storage.plane(name).untyped_storage().nbytes() for name in storage.names)
    assert storage.num_bytes == allocated
    assert allocated == (num_blocks + 1) * bytes_per_block(specs, block_size)
    assert bytes_per_block(specs, block_size) == block_size * sum(
        math.prod(spec.shape) * spec.dtype.itemsize for spec in specs
    )


@given(specs=planes, block_size=st.integers(1, 8), budget=st.integers(-100, 5000))
def test_budget_holds_the_blocks_and_the_scratch_block_and_not_one_more(
    specs: list[PlaneSpec], block_size: int, budget: int
) -> None:
    count = blocks_in_budget(specs, block_size, budget)
    per_block = bytes_per_block(specs, block_size)
    assert count >= 0
    assert count == 0 or (count + 1) * per_block <= budget
    assert (count + 2) * per_block > budget


def test_planes_do_not_share_memory() -> None:
    storage = KVStorage(PLANES, num_blocks=2, block_size=4)
    storage.plane("target.0.k").fill_(1)
    assert not storage.plane("target.0.v").any()


def test_plane_is_the_tensor_itself() -> None:
    storage = KVStorage(PLANES, num_blocks=2, block_size=4)
    storage.plane("target.0.k")[5] = 7
    assert bool((storage.plane("target.0.k")[5] == 7).all())


def test_unknown_plane_is_a_key_error() -> None:
    with pytest.raises(KeyError, match=r"target\.1\.k"):
        KVStorage(PLANES, num_blocks=2, block_size=4).plane("target.1.k")


def test_plane_names_must_differ() -> None:
    with pytest.raises(ValueError, match="plane names must differ"):
        KVStorage((PLANES[0], PLANES[0]), num_blocks=2, block_size=4)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {num_blocks} and {block_size}"):
        KVStorage(PLANES, num_blocks=num_blocks, block_size=block_size)


def test_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 0 bytes"):
        blocks_in_budget((), 4, 1000)
