"""BlockPool: who holds which block. The only place where reference counts change.

Every block is in exactly one state::

    free    --allocate-->  used    --release, not cached-->  free
    used    --release, registered in the prefix cache-->     cached (last in the LRU)
    cached  --acquire-->   used
    cached  --evict: allocate finds no free block-->         used, content forgotten

An entry never dies before its children: whoever holds a block holds its whole prefix and releases it tail first, so
in the LRU children stand before their parents. A cached block is therefore always reachable from its root.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

from kvcache.block_map import CACHED, OF_REFERENCES
from kvcache.observer import CacheObserver
from kvcache.prefix import PrefixEntry


class BlockPool:
    """Blocks are the ints ``0 .. num_blocks - 1``. Every operation is O(1) per block. Not thread-safe."""

    def __init__(self, num_blocks: int, observer: CacheObserver | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be positive, got {num_blocks}")
        self.num_blocks = num_blocks
        self._observer = observer
        self.num_evictions = 0  # cached blocks whose content was given up, since the start
        self.num_shared = 0  # used blocks with more than one reference
        self._references = [0] * num_blocks
        self._entry_of: list[PrefixEntry | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, the next to evict first
        self._entries: dict[bytes, PrefixEntry] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._lru)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._lru)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._lru)

    def references(self, block: int) -> int:
        return self._references[block]

    def entry_of(self, block: int) -> PrefixEntry | None:
        """What the prefix cache knows ``block`` to hold. Stays while the block is referenced."""
        return self._entry_of[block]

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each, content unknown. Evicts only when no block is free.

        Raises ValueError, having changed nothing, if fewer are available.
        """
        free = self._free
        if count > len(free) + len(self._lru):
            raise ValueError(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        blocks = []
        for _ in range(count):
            block = free.pop() if free else self._evict()
            self._references[block] = 1
            blocks.append(block)
            if self._observer is not None:
                self._observer.allocated(block)
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a used or cached block. Raises ValueError for a free one."""
        references = self._references[block]
        if references == 0:
            if block not in self._lru:
                raise ValueError(f"block {block} is free: its content is gone")
            del self._lru[block]
        elif references == 1:
            self.num_shared += 1
        self._references[block] = references + 1
        if self._observer is not None:
            self._observer.acquired(block)

    def release(self, block: int) -> None:
        """One reference less. Raises ValueError if there is none. Release a table's blocks tail first."""
        references = self._references[block]
        if references == 0:
            raise ValueError(f"block {block} has no reference to release (double free)")
        self._references[block] = references - 1
        if self._observer is not None:
            self._observer.released(block)
        if references > 1:
            self.num_shared -= references == 2
            return
        entry = self._entry_of[block]
        if entry is None:
            self._free.append(block)
        elif entry.block == block:
            self._lru[block] = None
        else:
            self._drop_duplicate(entry, block)

    def states(self) -> bytearray:
        """The state of each block, in kvcache.block_map's letters. O(blocks), most of it at C speed."""
        try:
            states = bytearray(self._references)
        except ValueError:  # a block with more than 255 holders
            states = bytearray(map(min, self._references, repeat(255)))
        states = states.translate(OF_REFERENCES)
        for block in self._lru:
            states[block] = CACHED
        return states

    def find(self, block_hash: bytes, parent: PrefixEntry | None, salt: bytes, packed_ids: bytes) -> PrefixEntry | None:
        """The entry with this hash, if its content is the one asked for. Changes nothing."""
        entry = self._entries.get(block_hash)
        return entry if entry is not None and entry.holds(parent, salt, packed_ids) else None

    def register(
        self, block: int, block_hash: bytes, parent: PrefixEntry | None, salt: bytes, packed_ids: bytes
    ) -> PrefixEntry | None:
        """Put a used block's content into the prefix cache; returns its entry.

        The first block with a hash stays registered. A later one with the same content becomes its duplicate; with
        other content (a collision) it stays out, and None is returned. Raises ValueError if the block is not used
        by exactly one table or has an entry already.
        """
        if self._references[block] != 1 or self._entry_of[block] is not None:
            raise ValueError(f"block {block} is free, shared or already in the prefix cache")
        entry = self._entries.get(block_hash)
        if entry is None:
            entry = self._entries[block_hash] = PrefixEntry(block_hash, parent, salt, packed_ids, block)
        elif entry.holds(parent, salt, packed_ids):
            if entry.duplicates is None:
                entry.duplicates = {}
            entry.duplicates[block] = None
        else:
            return None
        self._entry_of[block] = entry
        return entry

    def _evict(self) -> int:
        block, _ = self._lru.popitem(last=False)
        entry = self._entry_of[block]
        assert entry is not None, block
        self._entry_of[block] = None
        if entry.duplicates:  # in use by another table, so the content is not lost
            heir = next(iter(entry.duplicates))
            del entry.duplicates[heir]
            entry.block = heir
        else:
            del self._entries[entry.hash]
            self.num_evictions += 1
        return block

    def _drop_duplicate(self, entry: PrefixEntry, block: int) -> None:
        assert entry.duplicates is not None, block
        del entry.duplicates[block]
        self._entry_of[block] = None
        self._free.append(block)
        if entry.block in self._lru:  # its content was in use until now
            self._lru.move_to_end(entry.block)

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the states partition the blocks and ``held`` explains every reference."""
        counts: Counter[int] = Counter()
        for blocks in held:
            assert len(set(blocks)) == len(blocks), f"a table holds a block twice: {list(blocks)}"
            counts.update(blocks)
        free, cached = set(self._free), set(self._lru)
        assert len(free) == len(self._free), f"free list holds a block twice: {self._free}"
        assert not free & cached, f"free and cached at once: {free & cached}"
        for block in range(self.num_blocks):
            references = self._references[block]
            assert references == counts.pop(block, 0), f"block {block}: {references} references, not as many holders"
            assert (references > 0) != (block in free or block in cached), f"block {block} is in two states or none"
            entry = self._entry_of[block]
            assert (entry is not None) or block not in cached, f"cached block {block} has no content"
            assert entry is None or block not in free, f"free block {block} has content"
            if entry is not None:
                assert self._entries.get(entry.hash) is entry, f"block {block}: its entry is not in the map"
                assert entry.block == block or (block in (entry.duplicates or {}) and references == 1), block
        assert not counts, f"held blocks outside the pool: {dict(counts)}"
        assert self.num_shared == sum(references > 1 for references in self._references), self.num_shared
        order = {block: i for i, block in enumerate(self._lru)}
        for key, entry in self._entries.items():
            assert key == entry.hash, f"entry of block {entry.block} is filed under another hash"
            assert self._entry_of[entry.block] is entry, f"block {entry.block} does not know its entry"
            assert all(self._entry_of[block] is entry for block in entry.duplicates or ()), entry.block
            parent = entry.parent
            if parent is None:
                continue
            assert self._entries.get(parent.hash) is parent, f"block {entry.block} has lost its parent"
            if entry.block in order and parent.block in order:
                assert order[entry.block] < order[parent.block], f"block {entry.block} would outlive its parent"
