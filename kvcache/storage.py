"""KV storage: planes of slots under one block table.

A plane is a tensor ``[num_slots, *shape]``; slot ``b * block_size + i`` is position ``i`` of block ``b``.
Behind the pool's blocks lies one scratch block, which dummy rows may write and nobody reads.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# How the planes' names begin: the model that is served, and the one that drafts for it.
TARGET_PLANES = "target"
DRAFT_PLANES = "draft"


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One plane: ``shape`` is what a slot holds, e.g. ``(num_kv_heads, head_dim)``."""

    name: str  # e.g. "target.3.k"
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class KVStorage:
    """Owns the plane tensors. Zeroed at the start; never touched by rollback."""

    def __init__(
        self, planes: Sequence[PlaneSpec], *, num_blocks: int, block_size: int, device: str | torch.device = "cpu"
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be positive, got {num_blocks} and {block_size}")
        names = [plane.name for plane in planes]
        if len(set(names)) != len(names):
            raise ValueError(f"plane names must differ, got {names}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = (num_blocks + 1) * block_size
        self._planes = {p.name: _zeros((slots, *p.shape), p.dtype, torch.device(device)) for p in planes}

    @property
    def scratch_block(self) -> int:
        """The block behind the pool's: its slots are ``scratch_block * block_size + i``."""
        return self.num_blocks

    def plane(self, name: str) -> Tensor:
        """``[(num_blocks + 1) * block_size, *shape]``. Raises KeyError for an unknown name."""
        return self._planes[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._planes)

    @property
    def num_bytes(self) -> int:
        """Memory of all planes, the scratch block included."""
        return sum(plane.nbytes for plane in self._planes.values())


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zero and cost nothing until they are written: gigabytes would take seconds to clear.
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def bytes_per_block(planes: Sequence[PlaneSpec], block_size: int) -> int:
    """Memory of one block over all planes, in bytes."""
    return block_size * sum(plane.bytes_per_slot for plane in planes)


def blocks_in_budget(planes: Sequence[PlaneSpec], block_size: int, budget_bytes: int) -> int:
    """How many blocks (the scratch block not counted) fit into ``budget_bytes``; at least 0.

    Raises ValueError if a block takes no memory (no planes, or empty ones).
    """
    per_block = bytes_per_block(planes, block_size)
    if per_block < 1:
        raise ValueError(f"a block of {block_size} slots over {len(planes)} planes takes {per_block} bytes")
    return max(0, budget_bytes // per_block - 1)
