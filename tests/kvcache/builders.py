"""Builders for the kvcache tests."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.manager import KVCacheManager
from kvcache.prefix import sha256
from kvcache.table import BlockTable


def one_bit_hash(data: bytes) -> bytes:
    """Collides all the time: two values only."""
    return bytes([sha256(data)[0] & 1])


def constant_hash(data: bytes) -> bytes:
    """Collides always."""
    return b"!"


def computed(manager: KVCacheManager, token_ids: Sequence[int], salt: bytes = b"") -> BlockTable:
    """A table whose ``token_ids`` are all verified, written and committed, whatever the cache held before."""
    table = manager.new_table(salt)
    assert manager.reserve(table, len(token_ids))
    manager.commit(table, token_ids, len(token_ids))
    return table


def matched(manager: KVCacheManager, token_ids: Sequence[int], salt: bytes = b"") -> BlockTable:
    """A new table with what the prefix cache has of ``token_ids``."""
    table = manager.new_table(salt)
    manager.match_prefix(table, token_ids, len(token_ids))
    return table


def lookup(manager: KVCacheManager, token_ids: Sequence[int], salt: bytes = b"") -> int:
    """How many tokens the prefix cache covers now. Leaves references as they were, but touches the LRU."""
    table = matched(manager, token_ids, salt)
    covered = table.num_slots
    manager.free(table)
    return covered
