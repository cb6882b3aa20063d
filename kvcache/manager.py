"""KVCacheManager: blocks for sequences, and the prefix cache between them.

Life of a table::

    new_table -> match_prefix -> [reserve -> (a step writes KV) -> commit -> truncate]* -> free

    position   0 ............ committed ............ verified ............ num_slots
    blocks     |  full, hashed   |  written, open    |  lookahead, surplus   |
                shared, read-only  one table's own     truncate gives it back

Ordering contract. There is no lock: exactly one thread may use the manager at a time. While a step runs the manager
belongs to the model thread (which commits and truncates); between steps to the scheduler (which matches, reserves,
frees and reads stats). The awaited step is the handover. ``commit`` comes after acceptance, before ``truncate``.

Private blocks lie behind the pool's. A private table takes its blocks from there alone and never meets the prefix
cache, so whatever runs in one (an audit) cannot take a block from the others, nor a cached prefix, nor share one.

::

    block   0 ............ num_blocks - 1 | num_blocks ...... num_blocks + num_private_blocks - 1
            everybody's, prefix cache     | private tables'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcache.block_map import PARTLY
from kvcache.observer import CacheObserver
from kvcache.pool import BlockPool
from kvcache.prefix import HashFunction, PrefixEntry, PrefixHasher, pack_token_ids, sha256
from kvcache.table import BlockTable


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    num_blocks: int
    free_blocks: int  # no reference, no cached content
    cached_blocks: int  # no reference, content kept for the prefix cache (evictable)
    used_blocks: int  # referenced
    prefix_queries: int  # tokens asked for, since the start
    prefix_hits: int  # tokens found
    evictions: int = 0  # cached contents given up, since the start
    block_size: int = 1
    used_slots: int | None = None  # slots of used blocks that hold KV; None: stats() got no tables
    shared_blocks: int = 0  # used blocks that several tables refer to
    last_block_slots: int | None = None  # empty slots of partly filled blocks; None as for used_slots

    @property
    def usage(self) -> float:
        """Used blocks / all blocks."""
        return self.used_blocks / self.num_blocks

    @property
    def fragmentation_ratio(self) -> float | None:
        """1 - used slots / slots of allocated blocks; 0 while none is allocated; None without ``used_slots``."""
        if self.used_slots is None:
            return None
        return 1.0 - self.used_slots / (self.used_blocks * self.block_size) if self.used_blocks else 0.0


class KVCacheManager:
    """Owns the pools. Tables belong to their sequences, but only the manager changes them.

    The storage must hold ``num_blocks + num_private_blocks`` (which may be 0). Raises ValueError for sizes that are not
    positive. ``observer`` (a kvcache.ledger.Ledger) hears of every block that
    changes hands. ``hash_function`` exists for tests.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_cache: bool = True,
        num_private_blocks: int = 0,
        hash_function: HashFunction = sha256,
        observer: CacheObserver | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be positive, got {block_size}")
        if num_private_blocks < 0:
            raise ValueError(f"num_private_blocks must not be negative, got {num_private_blocks}")
        self.num_blocks = num_blocks
        self.num_private_blocks = num_private_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._observer = observer
        self._pool = BlockPool(num_blocks, observer)
        # It counts from 0, so what the observer hears of it is told here.
        self._private = BlockPool(num_private_blocks) if num_private_blocks else None
        self._hasher = PrefixHasher(hash_function)
        self._prefix_queries = 0
        self._prefix_hits = 0

    def new_table(self, salt: bytes = b"") -> BlockTable:
        """An empty table. Tables with different salts never share a block."""
        return BlockTable(self.block_size, salt)

    def new_private_table(self) -> BlockTable:
        """An empty table that takes private blocks, and shares none."""
        return BlockTable(self.block_size, private=True)

    @property
    def num_private_used(self) -> int:
        """Private blocks that a table holds."""
        return self._private.num_used if self._private is not None else 0

    def match_prefix(self, table: BlockTable, token_ids: Sequence[int], max_tokens: int) -> int:
        """Attach cached blocks to the empty ``table``; returns the tokens covered (<= max_tokens, whole blocks).

        The blocks are referenced from then on, so nothing can evict them. Never allocates and never evicts.
        Raises ValueError if the table holds blocks or ``max_tokens`` is negative.
        """
        self._check_table(table)
        if table.blocks:
            raise ValueError(f"a prefix is matched into an empty table, this one has {len(table.blocks)} blocks")
        if max_tokens < 0:
            raise ValueError(f"max_tokens must not be negative, got {max_tokens}")
        if not self.enable_prefix_cache or table.private:
            return 0
        size, pool, salt = self.block_size, self._pool, table.salt
        limit = min(len(token_ids), max_tokens)
        self._prefix_queries += limit
        chain = self._hasher.root(salt)
        entry: PrefixEntry | None = None
        for start in range(0, limit - size + 1, size):
            packed = pack_token_ids(token_ids[start : start + size])
            chain = self._hasher.extend(chain, packed)
            entry = pool.find(chain, entry, salt, packed)
            if entry is None:
                break
            pool.acquire(entry.block)
            table.blocks.append(entry.block)
            table.block_hashes.append(chain)
            if self._observer is not None:
                self._observer.shared(table, entry.block)
        covered = len(table.blocks) * size
        self._prefix_hits += covered
        return covered

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        """Make ``table`` cover ``num_tokens`` positions. All or nothing: False means preempt someone.

        Cached blocks are evicted, least recently used first, only when no block is free. Never shrinks the table.
        """
        blocks = table.blocks
        missing = -(-num_tokens // self.block_size) - len(blocks)
        if missing <= 0:
            return True
        self._check_table(table)
        if table.private:
            return self._reserve_private(table, missing)
        if missing > self._pool.num_available:
            return False
        granted = self._pool.allocate(missing)
        blocks.extend(granted)
        if self._observer is not None:
            self._observer.granted(table, granted)
        return True

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """``token_ids[:num_tokens]`` are verified and their KV is written: hash the full blocks among them.

        Call it after acceptance: drafts that were not accepted must not be in ``token_ids[:num_tokens]``. Costs
        nothing unless a block filled up. Raises ValueError, having changed nothing, if ``num_tokens`` exceeds the
        tokens or the table.
        """
        hashes, size = table.block_hashes, self.block_size
        if num_tokens > len(token_ids) or num_tokens > len(table.blocks) * size:
            raise ValueError(
                f"cannot commit {num_tokens} tokens: {len(token_ids)} known, {len(table.blocks)} blocks of {size} slots"
            )
        first, full = len(hashes), num_tokens // size
        if full <= first or not self.enable_prefix_cache or table.private:
            return
        self._check_table(table)
        pool, salt = self._pool, table.salt
        chain = hashes[-1] if hashes else self._hasher.root(salt)
        parent = pool.entry_of(table.blocks[first - 1]) if first else None
        # Behind a collision nothing can be found, so nothing is registered.
        reachable = first == 0 or parent is not None
        for i in range(first, full):
            ids = token_ids[i * size : (i + 1) * size]
            packed = pack_token_ids(ids)
            chain = self._hasher.extend(chain, packed)
            if reachable:
                parent = pool.register(table.blocks[i], chain, parent, salt, packed)
                reachable = parent is not None
            hashes.append(chain)
            if self._observer is not None:
                self._observer.committed(table, i, table.blocks[i], ids)

    def truncate(self, table: BlockTable, num_tokens: int) -> int:
        """Give back whole surplus blocks beyond ``num_tokens`` positions; returns how many. Touches no tensor.

        Raises ValueError, having changed nothing, if that would cut into committed blocks.
        """
        size = self.block_size
        if num_tokens < len(table.block_hashes) * size or num_tokens < 0:
            raise ValueError(f"cannot truncate to {num_tokens} tokens: {len(table.block_hashes) * size} are committed")
        keep = -(-num_tokens // size)
        blocks = table.blocks
        surplus = len(blocks) - keep
        if surplus <= 0:
            return 0
        self._check_table(table)
        self._give_back(table, surplus)
        return surplus

    def free(self, table: BlockTable) -> None:
        """Give everything back; the table is empty and may be used again. Freeing an empty table does nothing."""
        self._check_table(table)
        table.block_hashes.clear()
        self._give_back(table, len(table.blocks))

    def fits(self, num_tokens: int) -> bool:
        """Could an empty pool hold a sequence of ``num_tokens``?"""
        return self.blocks_for(num_tokens) <= self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold a sequence of ``num_tokens``."""
        return -(-num_tokens // self.block_size)

    def stats(self, tables: Iterable[tuple[BlockTable, int]] | None = None) -> KVCacheStats:
        """Plain numbers of now. Private blocks are not among them.

        ``tables`` are pairs (table, its sequence's ``num_computed``) of everything that holds blocks; with them the
        stats know ``used_slots`` and the fragmentation. Slots of shared blocks count once. O(blocks of the tables)
        while blocks are shared, O(tables) otherwise.
        """
        held = None if tables is None else list(tables)
        return KVCacheStats(
            num_blocks=self.num_blocks,
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            used_blocks=self._pool.num_used,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            evictions=self._pool.num_evictions,
            block_size=self.block_size,
            used_slots=None if held is None else self._used_slots(held),
            shared_blocks=self._pool.num_shared,
            # A shared block is full, so none is counted twice.
            last_block_slots=None if held is None else sum(-computed % self.block_size for _, computed in held),
        )

    def block_map(self, tables: Iterable[tuple[BlockTable, int]]) -> str:
        """One character a block, see kvcache.block_map; private blocks are not in it. ``tables`` as for :meth:`stats`.

        O(blocks), and allocates as much: to be looked at now and then, not in every step.
        """
        states = self._pool.states()
        for table, num_computed in tables:
            if not table.private:
                for block in table.blocks[num_computed // self.block_size :]:
                    states[block] = PARTLY
        return states.decode("ascii")

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raise AssertionError unless every block is free, cached or owned by exactly its referencing ``tables``."""
        tables = list(tables)
        self._pool.check_integrity([table.blocks for table in tables if not table.private])
        private = [table for table in tables if table.private]
        assert self._private is not None or not any(table.blocks for table in private)
        if self._private is not None:
            self._private.check_integrity([[b - self.num_blocks for b in table.blocks] for table in private])
        assert not any(table.block_hashes for table in private), "a private table's blocks were hashed"
        for table in tables:
            if table.private:
                continue
            assert table.block_size == self.block_size, table.block_size
            assert len(table.block_hashes) <= len(table.blocks), "committed blocks are not a prefix of the table"
            parent: PrefixEntry | None = None
            reachable = True
            for i, block in enumerate(table.blocks):
                entry = self._pool.entry_of(block)
                if i >= len(table.block_hashes):
                    assert entry is None, f"block {block} is in the prefix cache but not committed"
                    continue
                assert reachable or entry is None, f"block {block} is registered behind one that is not"
                if entry is not None:
                    assert entry.hash == table.block_hashes[i], f"block {block} has another hash than its table says"
                    assert entry.parent is parent, f"block {block} stands in another prefix"
                    assert entry.salt == table.salt, f"block {block} belongs to another salt"
                parent, reachable = entry, entry is not None

    def _reserve_private(self, table: BlockTable, missing: int) -> bool:
        if self._private is None or missing > self._private.num_available:
            return False
        granted = [self.num_blocks + block for block in self._private.allocate(missing)]
        table.blocks.extend(granted)
        if self._observer is not None:
            for block in granted:
                self._observer.allocated(block)
            self._observer.granted(table, granted)
        return True

    def _release(self, table: BlockTable, block: int) -> None:
        if not table.private:
            self._pool.release(block)
            return
        assert self._private is not None, "a private table holds blocks of a manager that has none"
        self._private.release(block - self.num_blocks)
        if self._observer is not None:
            self._observer.released(block)

    def _give_back(self, table: BlockTable, count: int) -> None:
        """Release the last ``count`` blocks, tail first: in the LRU a block must stand before those it follows."""
        for _ in range(count):
            block = table.blocks.pop()
            self._release(table, block)
            if self._observer is not None:
                self._observer.returned(table, block)

    def _used_slots(self, tables: list[tuple[BlockTable, int]]) -> int:
        used = sum(min(num_computed, table.num_slots) for table, num_computed in tables)
        if sum(len(table.blocks) for table, _ in tables) <= self._pool.num_used:
            return used  # nothing is shared
        seen: set[int] = set()
        for table, _ in tables:
            # Only committed blocks are shared, and they are full for every holder.
            for block in table.blocks[: len(table.block_hashes)]:
                if block in seen:
                    used -= self.block_size
                seen.add(block)
        return used

    def _check_table(self, table: BlockTable) -> None:
        if table.block_size != self.block_size:
            raise ValueError(f"the table has blocks of {table.block_size} slots, the manager of {self.block_size}")
