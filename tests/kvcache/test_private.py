"""Private blocks: a private table takes nothing from the others and leaves nothing behind."""

from __future__ import annotations

import pytest

from kvcache.manager import KVCacheManager


def test_a_private_table_takes_only_private_blocks_and_all_of_them_at_most() -> None:
    manager = KVCacheManager(3, 4, num_private_blocks=2)
    table = manager.new_private_table()
    assert manager.reserve(table, 8)
    assert sorted(table.blocks) == [3, 4]
    assert not manager.reserve(manager.new_private_table(), 1)
    stats = manager.stats()
    assert (stats.free_blocks, stats.used_blocks, manager.num_private_used) == (3, 0, 2)
    manager.check_integrity([table])
    manager.truncate(table, 4)
    manager.free(table)
    assert manager.num_private_used == 0
    manager.check_integrity([])


def test_a_full_pool_does_not_spill_into_private_blocks() -> None:
    manager = KVCacheManager(3, 4, num_private_blocks=2)
    assert not manager.reserve(manager.new_table(), 13)
    assert not manager.fits(13)


def test_a_private_table_neither_finds_nor_leaves_a_prefix() -> None:
    manager = KVCacheManager(4, 4, num_private_blocks=2)
    ids = list(range(8))
    shared = manager.new_table()
    manager.reserve(shared, 8)
    manager.commit(shared, ids, 8)
    private = manager.new_private_table()
    assert manager.match_prefix(private, ids, 8) == 0
    manager.free(shared)
    other = KVCacheManager(4, 4, num_private_blocks=2)
    table = other.new_private_table()
    other.reserve(table, 8)
    other.commit(table, ids, 8)
    assert other.match_prefix(other.new_table(), ids, 8) == 0
    other.free(table)
    assert other.stats().cached_blocks == 0


@pytest.mark.parametrize("count", [-1])
def test_a_negative_number_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="num_private_blocks"):
        KVCacheManager(4, 4, num_private_blocks=count)
