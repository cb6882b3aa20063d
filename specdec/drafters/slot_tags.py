"""Which prefix a slot of a draft model's planes was computed for, so that what is valid is decided by content.

::

    position    0         1            2                 tag(p) = rolling hash of tokens[0 .. p]
    tokens      t0        t1           t2
    tag         h(t0)     h(t0 t1)     h(t0 t1 t2)
    slot holds  h(t0)     h(t0 t1)     h(t0 t9 t2)       -> the first two positions are valid

KV at a position depends on the tokens up to it and on nothing else, so a slot that holds a position's tag holds its
KV, whoever wrote it and when: a prefix-cache hit, a preemption, a spell without drafts and a block with another owner
need no case of their own. Two prefixes share a tag with a chance of 2**-64; that would cost accepted drafts, nothing
else.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

NO_TAG = 0  # no prefix has it: the slot holds nothing that is known
_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_FEW = 16  # positions that are looked up one by one


def root_tag(salt: bytes) -> int:
    """The tag of the empty prefix under a cache salt: tenants never meet each other's tags."""
    return int.from_bytes(hashlib.sha256(salt).digest()[:8], "little")


def next_tag(tag: int, token: int) -> int:
    """The tag of a prefix with ``tag``, and ``token`` behind it."""
    # Each step is a bijection of the tag, so prefixes that differ once go on differing while their tokens are equal.
    tag = ((tag ^ (token + 1)) * _FACTOR) & _MASK
    return (tag ^ (tag >> 29)) or 1


class SlotTags:
    """A tag for each slot of a storage, 64 bits; :data:`NO_TAG` at the start."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._tags = np.zeros(num_slots, dtype=np.uint64)
        self._block_size = block_size

    @property
    def known(self) -> NDArray[np.bool_]:
        """Which slots hold the KV of some prefix, ``[num_slots]``."""
        found: NDArray[np.bool_] = self._tags != NO_TAG
        return found

    def set(self, slots: NDArray[np.int64], tags: Seq[int]) -> None:
        """The slots hold what ``tags`` say."""
        self._tags[slots] = np.array(tags, dtype=np.uint64)

    def clear(self, slots: NDArray[np.int64]) -> None:
        """The slots hold nothing that is known."""
        self._tags[slots] = NO_TAG

    def valid_until(self, blocks: Seq[int], tags: array[int], start: int, end: int) -> int:
        """The first position from ``start`` on, below ``end``, whose slot in ``blocks`` lacks its tag; else ``end``.

        ``tags[p]`` is position p's. O(1) a position; long stretches in one go.
        """
        held, size = self._tags, self._block_size
        few = min(end, start + _FEW)
        for position in range(start, few):
            if held[blocks[position // size] * size + position % size] != tags[position]:
                return position
        if few >= end:
            return max(start, end)
        first = few // size
        table = np.array(blocks[first : -(-end // size)], dtype=np.int64)
        slots = (table[:, None] * size + np.arange(size)).reshape(-1)[few - first * size : end - first * size]
        wrong = held[slots] != np.frombuffer(tags[few:end], dtype=np.uint64)
        return few + int(wrong.argmax()) if wrong.any() else end
