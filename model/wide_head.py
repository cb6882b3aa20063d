"""The head of a Hugging Face model on float32: rounding logits to bfloat16 makes exact ties common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import Kernels

_SLICE = 8192  # rows of the weight that are multiplied, or widened, at a time
_KEPT_BYTES = 1 << 30  # a float32 copy of at most this size is kept; a larger weight is widened at each use


class WideHead:
    """Replaces ``head``'s forward: float32 logits from float32 products of a bfloat16 weight.

    With ``kernels`` (on a CPU) the weight is packed for the compiled product, which takes the bfloat16 as it is and
    treats each row by itself; that is several times faster, and the head of a small model is most of it. Without, a
    float32 copy is kept if it is not too large.
    """

    def __init__(self, head: nn.Linear, kernels: Kernels | None = None) -> None:
        self.rows: int | None = None  # logits are wanted for so many rows from the first on (None: all); rest: zeros
        self.plain = False  # True: leave the compiled product alone, for a comparison
        self._head = head
        self._kernels = kernels
        weight = head.weight.detach()
        bias = None if head.bias is None else head.bias.detach()
        self._packed = None if kernels is None else kernels.pack(weight, bias)
        self._slices = head_slices(weight) if kernels is None else list(weight.split(_SLICE))
        object.__setattr__(head, "forward", self)

    def __call__(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` -> ``[1, T, V]`` float32."""
        if self.rows == 0:
            return x.new_zeros((*x.shape[:-1], self._head.out_features), dtype=torch.float32)
        if self._kernels is None or self._packed is None or self.plain:
            return self._on_torch(x.float())
        rows = x.reshape(-1, x.shape[-1])
        wanted = self._kernels.matmul(rows[: self.rows].contiguous(), self._packed)
        logits = wanted if len(wanted) == len(rows) else F.pad(wanted, (0, 0, 0, len(rows) - len(wanted)))
        return logits.view(*x.shape[:-1], -1)

    def _on_torch(self, x: Tensor) -> Tensor:
        logits = float_logits(x, self._slices)
        return logits if self._head.bias is None else logits + self._head.bias.float()


def head_slices(weight: Tensor) -> list[Tensor]:
    """Of the head's ``weight`` ``[V, H]``, for :func:`float_logits`: in float32 if a copy of that size may be kept."""
    keep = 4 * weight.numel() <= _KEPT_BYTES
    return [part.float() if keep else part for part in weight.split(_SLICE)]


def float_logits(x: Tensor, slices: Sequence[Tensor]) -> Tensor:
    """``x`` ``[.., H]`` float32 -> ``[.., V]``: products in float32, slice by slice."""
    return torch.cat([F.linear(x, part.float()) for part in slices], dim=-1)
