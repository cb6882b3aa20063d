"""BlockPool: states, reference counts and eviction, without tables."""

from __future__ import annotations

import pytest

from kvcache.pool import BlockPool


def cached(pool: BlockPool, name: bytes) -> int:
    """One unreferenced block with content ``name``."""
    (block,) = pool.allocate(1)
    pool.register(block, name, None, b"", name)
    pool.release(block)
    return block


def test_fresh_pool_is_all_free() -> None:
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_cached, pool.num_used, pool.num_available) == (3, 0, 0, 3)
    pool.check_integrity([])


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=str(num_blocks)):
        BlockPool(num_blocks)


def test_allocated_blocks_are_distinct_ints_of_the_pool() -> None:
    blocks = BlockPool(5).allocate(5)
    assert sorted(blocks) == [0, 1, 2, 3, 4]


def test_allocating_too_many_changes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 of 3"):
        pool.allocate(2)
    pool.check_integrity([held])
    assert pool.num_free == 1


def test_double_free_raises_and_changes_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.release(block)
    with pytest.raises(ValueError, match="double free"):
        pool.release(block)
    pool.check_integrity([])
    assert pool.num_free == 2


def test_double_free_of_a_cached_block_raises() -> None:
    pool = BlockPool(2)
    block = cached(pool, b"a")
    with pytest.raises(ValueError, match="double free"):
        pool.release(block)
    pool.check_integrity([])


def test_free_block_cannot_be_acquired() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="block 0 is free"):
        pool.acquire(0)


def test_block_is_used_until_its_last_reference_goes() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release(block)
    assert (pool.num_used, pool.references(block)) == (1, 1)
    pool.release(block)
    assert pool.num_free == 1


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    block = cached(pool, b"a")
    held = pool.allocate(2)
    assert block not in held
    assert pool.num_evictions == 0
    assert pool.allocate(1) == [block]
    assert pool.num_evictions == 1


def test_eviction_takes_the_least_recently_used() -> None:
    pool = BlockPool(3)
    a, b, c = cached(pool, b"a"), cached(pool, b"b"), cached(pool, b"c")
    pool.acquire(a)
    pool.release(a)
    assert pool.allocate(3) == [b, c, a]


def test_referenced_cached_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    a, b = cached(pool, b"a"), cached(pool, b"b")
    pool.acquire(a)
    assert pool.allocate(1) == [b]
    with pytest.raises(ValueError, match="0 of 2 available"):
        pool.allocate(1)
    assert pool.find(b"a", None, b"", b"a") is pool.entry_of(a)


def test_evicted_content_is_found_no_more() -> None:
    pool = BlockPool(1)
    cached(pool, b"a")
    pool.allocate(1)
    assert pool.find(b"a", None, b"", b"a") is None


def test_first_block_with_a_hash_stays_registered() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    entry = pool.register(first, b"h", None, b"", b"ids")
    assert pool.register(second, b"h", None, b"", b"ids") is entry
    assert entry is not None
    assert entry.block == first
    pool.check_integrity([[first], [second]])


def test_unreferenced_duplicate_is_free() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"h", None, b"", b"ids")
    pool.register(second, b"h", None, b"", b"ids")
    pool.release(second)
    pool.check_integrity([[first]])
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_duplicate_in_use_inherits_evicted_content() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    entry = pool.register(first, b"h", None, b"", b"ids")
    pool.register(second, b"h", None, b"", b"ids")
    pool.release(first)
    pool.allocate(1)
    assert pool.find(b"h", None, b"", b"ids") is entry
    assert entry is not None
    assert entry.block == second
    assert pool.num_evictions == 0
    pool.check_integrity([[first], [second]])


def test_colliding_content_stays_out() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"h", None, b"", b"ids")
    assert pool.register(second, b"h", None, b"", b"other ids") is None
    assert pool.find(b"h", None, b"", b"other ids") is None


@pytest.mark.parametrize("state", ["free", "shared", "registered"])
def test_only_an_exclusive_new_block_can_be_registered(state: str) -> None:
    pool = BlockPool(1)
    if state != "free":
        pool.allocate(1)
    if state == "shared":
        pool.acquire(0)
    if state == "registered":
        pool.register(0, b"h", None, b"", b"ids")
    with pytest.raises(ValueError, match="block 0"):
        pool.register(0, b"h", None, b"", b"ids")


def test_integrity_check_sees_a_leak_and_a_stranger() -> None:
    pool = BlockPool(2)
    held = pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([held, held])
    with pytest.raises(AssertionError):
        pool.check_integrity([held, [7]])
