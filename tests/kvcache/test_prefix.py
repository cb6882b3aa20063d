"""What a prefix hit is: same salt, same ids, same parent."""

from __future__ import annotations

import hashlib
import itertools

import pytest

from kvcache.manager import KVCacheManager
from kvcache.prefix import PrefixHasher, pack_token_ids
from tests.kvcache.builders import computed, constant_hash, lookup, matched, one_bit_hash


@pytest.mark.case("O 3722")
def test_hash_is_chained_sha256_from_a_salted_root() -> None:
    hasher = PrefixHasher()
    root = hasher.root(b"tenant")
    ids = pack_token_ids([1, 2])
    assert root == hashlib.sha256(b"truedraft prefix root\0tenant").digest()
    assert hasher.extend(root, ids) == hashlib.sha256(root + ids).digest()
    assert hasher.root(b"other") != root


def test_packed_ids_are_equal_only_for_equal_ids() -> None:
    runs = [[], [0], [0, 0], [1], [256], [1, 0], [0, 1], [2**32], [-1]]
    assert len({pack_token_ids(run) for run in runs}) == len(runs)


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_warm_coverage_is_every_full_block_below_the_limit(block_size: int) -> None:
    tokens = [i % 7 for i in range(3 * block_size)]
    manager = KVCacheManager(8, block_size)
    cold = computed(manager, tokens)
    blocks = list(cold.blocks)
    manager.free(cold)
    for limit in {0, 1, block_size - 1, block_size, 2 * block_size, 3 * block_size - 1, 3 * block_size}:
        table = manager.new_table()
        assert manager.match_prefix(table, tokens, limit) == limit // block_size * block_size
        assert table.blocks == blocks[: limit // block_size]
        assert table.num_committed_tokens == table.num_slots
        manager.check_integrity([table])
        manager.free(table)


def test_match_stops_where_the_ids_differ() -> None:
    manager = KVCacheManager(8, 2)
    computed(manager, [1, 2, 3, 4, 5, 6])
    assert lookup(manager, [1, 2, 3, 4, 5, 7]) == 4
    assert lookup(manager, [1, 2, 3, 9, 5, 6]) == 2
    assert lookup(manager, [9, 2, 3, 4, 5, 6]) == 0


def test_same_ids_behind_another_prefix_do_not_match() -> None:
    manager = KVCacheManager(8, 1)
    computed(manager, [1, 5])
    computed(manager, [2])
    assert lookup(manager, [2, 5]) == 1


@pytest.mark.case("O 3722")
def test_salts_separate_tenants() -> None:
    manager = KVCacheManager(8, 2)
    a = computed(manager, [1, 2, 3, 4], b"a")
    assert lookup(manager, [1, 2, 3, 4], b"b") == 0
    assert lookup(manager, [1, 2, 3, 4]) == 0
    b = computed(manager, [1, 2, 3, 4], b"b")
    assert not set(a.blocks) & set(b.blocks)
    assert matched(manager, [1, 2, 3, 4], b"a").blocks == a.blocks
    assert matched(manager, [1, 2, 3, 4], b"b").blocks == b.blocks


def test_salts_stay_apart_even_if_their_hashes_collide() -> None:
    manager = KVCacheManager(8, 2, hash_function=constant_hash)
    computed(manager, [1, 2], b"a")
    assert lookup(manager, [1, 2], b"a") == 2
    assert lookup(manager, [1, 2], b"b") == 0


@pytest.mark.case("O 3722")
def test_collision_of_block_ids_misses() -> None:
    manager = KVCacheManager(8, 2, hash_function=constant_hash)
    computed(manager, [1, 2])
    assert lookup(manager, [3, 4]) == 0


def test_equal_hash_and_ids_behind_another_parent_miss() -> None:
    manager = KVCacheManager(8, 1, hash_function=lambda data: data[-8:])  # a hash that forgets the chain
    computed(manager, [1, 5])
    computed(manager, [2])
    assert lookup(manager, [1, 5]) == 2
    assert lookup(manager, [2, 5]) == 1
    assert lookup(manager, [5]) == 0


def test_sequence_behind_a_collision_goes_on_without_the_cache() -> None:
    manager = KVCacheManager(8, 1, hash_function=constant_hash)
    first = computed(manager, [1, 2, 3])
    assert first.num_committed_tokens == 3
    assert lookup(manager, [1, 2, 3]) == 1
    manager.check_integrity([first])
    manager.free(first)
    assert manager.stats().cached_blocks == 1


@pytest.mark.parametrize("hash_function", [one_bit_hash, constant_hash])
def test_weak_hash_never_gives_a_block_of_another_prefix(hash_function: object) -> None:
    manager = KVCacheManager(24, 1, hash_function=hash_function)  # type: ignore[arg-type]
    prefixes = list(itertools.product([0, 1], repeat=3))
    content: dict[int, tuple[int, ...]] = {}
    for prefix in prefixes:
        table = computed(manager, prefix)
        content.update({block: prefix[: i + 1] for i, block in enumerate(table.blocks)})
    for prefix in prefixes:
        table = matched(manager, prefix)
        assert [content[block] for block in table.blocks] == [prefix[: i + 1] for i in range(len(table.blocks))]
        manager.free(table)


def test_disabled_cache_finds_and_keeps_nothing() -> None:
    manager = KVCacheManager(4, 1, enable_prefix_cache=False)
    table = computed(manager, [1, 2, 3])
    assert lookup(manager, [1, 2, 3]) == 0
    manager.free(table)
    stats = manager.stats()
    assert (stats.free_blocks, stats.cached_blocks, stats.prefix_queries) == (4, 0, 0)
