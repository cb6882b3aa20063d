"""A block table: which physical blocks hold a sequence's logical positions.

::

    position      0 .. bs-1 | bs .. 2bs-1 | ...
    blocks[]      b0        | b1          | ...
    slot(p)     = blocks[p // bs] * bs + p % bs

Only the manager mutates a table.
"""

from __future__ import annotations


class BlockTable:
    """Owned by one sequence; ``blocks`` are references that the manager counted."""

    __slots__ = ("block_hashes", "block_size", "blocks", "private", "salt")

    def __init__(self, block_size: int, salt: bytes = b"", *, private: bool = False) -> None:
        self.block_size = block_size
        self.salt = salt  # separates tenants in the prefix cache
        self.private = private  # lives in the manager's private blocks, unknown to the prefix cache
        self.blocks: list[int] = []
        self.block_hashes: list[bytes] = []  # chained hashes of the committed (verified, full) blocks: a prefix

    @property
    def num_slots(self) -> int:
        """Positions that the table covers."""
        return len(self.blocks) * self.block_size

    @property
    def num_committed_tokens(self) -> int:
        """Tokens in committed blocks: these are never written again."""
        return len(self.block_hashes) * self.block_size

    def slot(self, position: int) -> int:
        """Raises IndexError if the table does not cover ``position``."""
        return self.blocks[position // self.block_size] * self.block_size + position % self.block_size
