"""Cosines and sines of all positions, computed once.

They are computed a fixed block of positions at a time, so that a position's values do not depend on which other
positions a batch holds (torch's cosine rounds differently in a vector and in its remainder).
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.fused_spec import FusedSpec

_BLOCK = 1024  # positions


class RopeTable:
    """Grows with the largest position seen. One thread at a time may use it."""

    def __init__(self, spec: FusedSpec, device: str | torch.device = "cpu") -> None:
        self._inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
        self._scale = spec.rope_scale
        self._device = device
        self._blocks: list[tuple[Tensor, Tensor]] = []
        half = len(spec.inv_freq)
        self._cosine = self._sine = torch.empty((0, half), dtype=torch.float32, device=device)

    def upto(self, last_position: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine, both ``[n, head_dim / 2]`` float32 with n > ``last_position``. Owned by the table."""
        if last_position >= self._cosine.shape[0]:
            wanted = max(last_position + 1, 2 * self._cosine.shape[0])
            while len(self._blocks) * _BLOCK < wanted:
                self._blocks.append(self._block(len(self._blocks) * _BLOCK))
            self._cosine = torch.cat([cosine for cosine, _ in self._blocks]).to(self._device)
            self._sine = torch.cat([sine for _, sine in self._blocks]).to(self._device)
        return self._cosine, self._sine

    def _block(self, first: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(first, first + _BLOCK, dtype=torch.int64).float()
        angles = positions[:, None] * self._inv_freq[None, :]
        return angles.cos() * self._scale, angles.sin() * self._scale
