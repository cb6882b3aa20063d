"""The prefix cache's keys: chained block hashes, and what is compared when a hash is found.

::

    root        = H(domain, salt)
    hash(b0)    = H(root,     token ids of b0)
    hash(b1)    = H(hash(b0), token ids of b1)

A hash only finds a candidate. A hit also needs the same salt, the same token ids and *the same parent entry*
(the object, not its hash), so that by induction from the root the whole prefix is equal. Two prefixes with equal
hashes can then cost a hit, never give a wrong block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence

HashFunction = Callable[[bytes], bytes]

_ROOT_DOMAIN = b"truedraft prefix root\0"


def sha256(data: bytes) -> bytes:
    """The default hash function: 32 bytes."""
    return hashlib.sha256(data).digest()


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Eight bytes an id, so equal bytes are equal ids. Raises OverflowError outside 64 bits."""
    return array("q", token_ids).tobytes()


class PrefixEntry:
    """A cached full block: its content (salt, parent, ids) and the physical blocks that hold it. Owned by the pool.

    ``block`` is registered: matches attach it. ``duplicates`` hold the same content, computed by sequences that ran
    side by side; each belongs to one table, and one takes over when the registered block is evicted before it.
    """

    __slots__ = ("block", "duplicates", "hash", "packed_ids", "parent", "salt")

    def __init__(
        self, block_hash: bytes, parent: PrefixEntry | None, salt: bytes, packed_ids: bytes, block: int
    ) -> None:
        self.hash = block_hash
        self.parent = parent  # None: the first block of its prefix
        self.salt = salt
        self.packed_ids = packed_ids
        self.block = block
        self.duplicates: dict[int, None] | None = None  # insertion-ordered set

    def holds(self, parent: PrefixEntry | None, salt: bytes, packed_ids: bytes) -> bool:
        """Is this exactly the block with these ids behind ``parent``?"""
        return self.parent is parent and self.packed_ids == packed_ids and self.salt == salt


class PrefixHasher:
    """Chains block hashes. ``hash_function`` is a parameter so that a test can force collisions."""

    __slots__ = ("_hash",)

    def __init__(self, hash_function: HashFunction = sha256) -> None:
        self._hash = hash_function

    def root(self, salt: bytes) -> bytes:
        """Where the chain of a tenant starts."""
        return self._hash(_ROOT_DOMAIN + salt)

    def extend(self, parent_hash: bytes, packed_ids: bytes) -> bytes:
        """Hash of the block with these ids behind the block (or root) with ``parent_hash``."""
        return self._hash(parent_hash + packed_ids)
