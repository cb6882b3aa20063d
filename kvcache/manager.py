"""KVCacheManager: blocks for sequences. Contract; see the room's builder for the body."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache.table import BlockTable


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    num_blocks: int
    free_blocks: int  # no reference, no cached content
    cached_blocks: int  # no reference, content kept for the prefix cache (evictable)
    used_blocks: int  # referenced
    prefix_queries: int  # tokens asked for, since the start
    prefix_hits: int  # tokens found


class KVCacheManager:
    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None: ...

    def new_table(self, salt: bytes = b"") -> BlockTable: ...

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int], max_tokens: int) -> int:
        """Attach cached blocks to the empty ``table``; returns the tokens covered (<= max_tokens, whole blocks)."""

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Make ``table`` cover ``num_tokens`` positions. All or nothing: False means preempt someone."""

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """``token_ids[:num_tokens]`` are verified and their KV is written: hash the full blocks among them."""

    def truncate(self, table: BlockTable, num_tokens: int) -> int:
        """Give back whole surplus blocks beyond ``num_tokens`` positions; returns how many. Touches no tensor."""

    def free(self, table: BlockTable) -> None:
        """Give everything back; the table is empty and may be used again."""

    def fits(self, num_tokens: int) -> bool:
        """Could an empty pool hold a sequence of ``num_tokens``?"""

    def stats(self) -> KVCacheStats: ...

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError unless every block is free, cached or owned by exactly its referencing ``tables``."""
