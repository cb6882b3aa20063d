"""KVCacheManager: one invariant a test."""

from __future__ import annotations

import pytest

from kvcache.manager import KVCacheManager
from kvcache.table import BlockTable
from tests.kvcache.builders import computed, lookup, matched


def test_reserve_covers_exactly_the_blocks_needed() -> None:
    manager = KVCacheManager(8, 4)
    table = manager.new_table()
    for num_tokens, num_blocks in [(0, 0), (1, 1), (4, 1), (5, 2), (3, 2), (16, 4)]:
        assert manager.reserve(table, num_tokens)
        assert len(table.blocks) == num_blocks
        manager.check_integrity([table])


def test_reserve_is_all_or_nothing() -> None:
    manager = KVCacheManager(4, 2)
    cached = computed(manager, [1, 2])
    manager.free(cached)
    table = manager.new_table()
    assert manager.reserve(table, 2)
    before = (list(table.blocks), manager.stats())
    assert not manager.reserve(table, 9)
    assert (table.blocks, manager.stats()) == before
    assert lookup(manager, [1, 2]) == 2


def test_reserve_crosses_several_blocks_at_once() -> None:
    manager = KVCacheManager(16, 1)
    table = computed(manager, [1])
    assert manager.reserve(table, 9)  # eight drafts over blocks of one slot
    assert len(set(table.blocks)) == 9


def test_reserve_never_evicts_what_was_just_matched() -> None:
    manager = KVCacheManager(4, 1)
    manager.free(computed(manager, [1, 2, 3, 4]))
    table = matched(manager, [1, 2, 3])
    assert manager.reserve(table, 4)
    assert not manager.reserve(table, 5)
    manager.check_integrity([table])
    assert len(set(table.blocks)) == 4


def test_match_never_evicts() -> None:
    manager = KVCacheManager(2, 1)
    manager.free(computed(manager, [1, 2]))
    assert lookup(manager, [1, 9]) == 1
    assert lookup(manager, [1, 2]) == 2
    assert manager.stats().evictions == 0


def test_match_wants_an_empty_table() -> None:
    manager = KVCacheManager(4, 1)
    table = computed(manager, [1])
    with pytest.raises(ValueError, match="has 1 blocks"):
        manager.match_prefix(table, [1], 1)
    with pytest.raises(ValueError, match="-1"):
        manager.match_prefix(manager.new_table(), [1], -1)


def test_table_of_another_block_size_is_refused() -> None:
    manager = KVCacheManager(4, 2)
    with pytest.raises(ValueError, match="4 slots, the manager of 2"):
        manager.reserve(BlockTable(4), 1)


def test_only_full_blocks_are_committed() -> None:
    manager = KVCacheManager(4, 4)
    table = manager.new_table()
    assert manager.reserve(table, 16)
    tokens = list(range(16))
    for num_tokens, committed in [(3, 0), (4, 4), (7, 4), (15, 12), (16, 16)]:
        manager.commit(table, tokens, num_tokens)
        assert table.num_committed_tokens == committed
        assert lookup(manager, tokens) == committed


def test_commit_again_changes_nothing() -> None:
    manager = KVCacheManager(4, 2)
    table = computed(manager, [1, 2, 3, 4])
    hashes = list(table.block_hashes)
    manager.commit(table, [1, 2, 3, 4], 4)
    manager.commit(table, [1, 2, 3, 4], 2)
    assert table.block_hashes == hashes
    manager.check_integrity([table])


def test_commit_of_unknown_or_uncovered_tokens_is_refused() -> None:
    manager = KVCacheManager(4, 2)
    table = manager.new_table()
    assert manager.reserve(table, 4)
    with pytest.raises(ValueError, match="cannot commit 3 tokens: 2 known"):
        manager.commit(table, [1, 2], 3)
    with pytest.raises(ValueError, match="2 blocks of 2 slots"):
        manager.commit(table, [1, 2, 3, 4, 5], 5)
    assert table.block_hashes == []


@pytest.mark.case("V 18668")
def test_rejected_ids_never_enter_the_cache() -> None:
    manager = KVCacheManager(8, 2)
    table = computed(manager, [1, 2, 3])
    assert manager.reserve(table, 8)  # drafts 7 7 7 7 were written to slots 3..6 and all rejected; 4 was sampled
    tokens = [1, 2, 3, 4]
    manager.commit(table, tokens, 3)
    manager.truncate(table, 3)
    assert lookup(manager, [1, 2, 3, 7, 7, 7]) == 2
    assert manager.reserve(table, 4)
    manager.commit(table, tokens, 4)
    assert lookup(manager, [1, 2, 3, 7, 7, 7]) == 2
    assert lookup(manager, tokens) == 4


def test_truncate_returns_whole_surplus_blocks_only() -> None:
    manager = KVCacheManager(8, 4)
    table = manager.new_table()
    assert manager.reserve(table, 20)
    kept = table.blocks[:2]
    assert manager.truncate(table, 17) == 0
    assert manager.truncate(table, 5) == 3
    assert table.blocks == kept
    assert manager.truncate(table, 8) == 0
    assert manager.truncate(table, 0) == 2
    assert manager.stats().free_blocks == 8


@pytest.mark.parametrize("num_tokens", [-1, 0, 3, 7])
def test_truncate_never_cuts_into_committed_blocks(num_tokens: int) -> None:
    manager = KVCacheManager(8, 4)
    table = computed(manager, list(range(9)))
    with pytest.raises(ValueError, match=f"to {num_tokens} tokens: 8 are committed"):
        manager.truncate(table, num_tokens)
    assert len(table.blocks) == 3
    assert manager.truncate(table, 8) == 1


def test_truncate_of_a_shared_prefix_leaves_the_other_table_whole() -> None:
    manager = KVCacheManager(8, 2)
    first = computed(manager, [1, 2, 3, 4])
    second = matched(manager, [1, 2, 3, 4])
    assert manager.reserve(second, 8)
    assert manager.truncate(second, 4) == 2
    manager.check_integrity([first, second])
    assert first.blocks == second.blocks


def test_free_leaves_a_usable_empty_table_and_is_idempotent() -> None:
    manager = KVCacheManager(4, 2)
    table = computed(manager, [1, 2, 3])
    manager.free(table)
    manager.free(table)
    assert (table.blocks, table.block_hashes) == ([], [])
    manager.check_integrity([table])
    assert manager.match_prefix(table, [1, 2, 3], 2) == 2


def test_shared_blocks_live_until_the_last_holder_frees() -> None:
    manager = KVCacheManager(3, 1)
    first = computed(manager, [1, 2])
    second = matched(manager, [1, 2])
    manager.free(first)
    assert manager.stats().used_blocks == 2
    assert not manager.reserve(manager.new_table(), 2)
    manager.free(second)
    assert manager.stats().cached_blocks == 2


def test_chain_is_evicted_from_its_tail() -> None:
    manager = KVCacheManager(4, 1)
    manager.free(computed(manager, [1, 2, 3, 4]))
    for evicted in range(1, 5):
        table = manager.new_table()
        assert manager.reserve(table, evicted)
        manager.free(table)
        probe = [1, 2, 3, 4]
        assert lookup(manager, probe) == 4 - evicted


def test_least_recently_used_prefix_is_evicted_first() -> None:
    manager = KVCacheManager(4, 1)
    manager.free(computed(manager, [1, 1]))
    manager.free(computed(manager, [2, 2]))
    assert lookup(manager, [1, 1]) == 2  # used again
    held = manager.new_table()
    assert manager.reserve(held, 2)
    assert lookup(manager, [2, 2]) == 0
    assert lookup(manager, [1, 1]) == 2


def test_chain_stays_reachable_when_its_owner_held_a_duplicate_of_its_head() -> None:
    """Two sequences compute the same head side by side; the one that registered it goes first."""
    manager = KVCacheManager(6, 1)
    first, second = computed(manager, [1, 2]), computed(manager, [1, 2, 3])
    manager.free(first)
    manager.check_integrity([second])
    held = manager.new_table()
    assert manager.reserve(held, 3)  # evicts the first one's blocks
    manager.check_integrity([second, held])
    assert matched(manager, [1, 2, 3]).blocks == second.blocks


def test_freed_duplicate_keeps_the_registered_head_behind_its_tail() -> None:
    manager = KVCacheManager(5, 1)
    first, second = computed(manager, [1, 2]), computed(manager, [1, 2, 3])
    manager.free(first)
    manager.free(second)
    manager.check_integrity([])
    assert manager.stats().cached_blocks == 3
    held = manager.new_table()
    assert manager.reserve(held, 3)
    assert lookup(manager, [1, 2, 3]) == 2


def test_fits_is_about_an_empty_pool() -> None:
    manager = KVCacheManager(3, 4)
    assert manager.reserve(manager.new_table(), 12)
    assert manager.fits(12)
    assert not manager.fits(13)


def test_prefix_counters_count_tokens() -> None:
    manager = KVCacheManager(8, 2)
    computed(manager, [1, 2, 3, 4])
    table = manager.new_table()
    assert manager.match_prefix(table, [1, 2, 3, 4, 5], 4) == 4
    assert manager.match_prefix(manager.new_table(), [9, 9, 9], 8) == 0
    stats = manager.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (7, 4)


def test_fragmentation_counts_shared_slots_once() -> None:
    manager = KVCacheManager(16, 4)
    first = computed(manager, list(range(8)))
    second = matched(manager, list(range(8)))
    assert manager.reserve(first, 9)
    assert manager.reserve(second, 12)
    stats = manager.stats([(first, 9), (second, 10)])
    assert stats.used_blocks == 4
    assert stats.used_slots == 8 + 1 + 2
    assert stats.fragmentation_ratio == pytest.approx(1 - 11 / 16)
    assert stats.last_block_slots == 3 + 2
    assert manager.stats().fragmentation_ratio is None
    assert manager.stats().last_block_slots is None


def test_fragmentation_of_an_idle_cache_is_zero() -> None:
    assert KVCacheManager(4, 4).stats([]).fragmentation_ratio == 0.0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_sizes_must_be_positive(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        KVCacheManager(num_blocks, block_size)


def test_slots_follow_the_blocks() -> None:
    table = BlockTable(4)
    table.blocks.extend([5, 2])
    assert [table.slot(p) for p in (0, 3, 4, 7)] == [20, 23, 8, 11]
    with pytest.raises(IndexError):
        table.slot(8)
