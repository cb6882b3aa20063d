"""The block map: a letter a block. The state machine holds it against random lives."""

from __future__ import annotations

from kvcache.manager import KVCacheManager
from tests.kvcache.builders import computed


def test_each_state_has_its_letter() -> None:
    manager = KVCacheManager(8, 2)
    cached = computed(manager, [7, 7])
    manager.free(cached)
    first = computed(manager, [1, 2, 3, 4, 5])
    second = manager.new_table()
    assert manager.match_prefix(second, [1, 2, 9], 2) == 2
    assert manager.reserve(second, 3)
    shown = manager.block_map([(first, 5), (second, 2)])
    letters = dict(enumerate(shown))
    assert [letters[block] for block in first.blocks] == ["s", "u", "p"]
    assert [letters[block] for block in second.blocks] == ["s", "p"]
    assert sorted(shown) == sorted("supp" + "c" + "...")
    assert manager.stats().shared_blocks == 1


def test_private_blocks_are_not_in_it() -> None:
    manager = KVCacheManager(2, 2, num_private_blocks=2)
    table = manager.new_private_table()
    assert manager.reserve(table, 4)
    assert manager.block_map([(table, 1)]) == ".."


def test_a_block_may_have_more_holders_than_a_byte_counts() -> None:
    manager = KVCacheManager(2, 2)
    computed(manager, [1, 2])
    tables = [manager.new_table() for _ in range(300)]
    assert all(manager.match_prefix(table, [1, 2], 2) == 2 for table in tables)
    assert sorted(manager.block_map([])) == [".", "s"]
    for table in tables:
        manager.free(table)
    assert manager.stats().shared_blocks == 0
