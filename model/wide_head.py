"""The head of a Hugging Face model on float32: rounding logits to bfloat16 makes exact ties common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.kernels import Kernels
from model.kernels.ops import PackedWeight
from model.linear_weight import LinearWeight

_SLICE = 8192  # rows of the weight that are multiplied, or widened, at a time
_KEPT_BYTES = 1 << 30  # a float32 copy of at most this size is kept; a larger weight is widened at each use

HeadSlice = Tensor | LinearWeight  # some rows of the weight: as they are, or in float32


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """What computes logits of some ids, a column each."""

    count: int
    slices: list[HeadSlice]  # for float_logits
    bias: Tensor | None  # [count] float32
    packed: PackedWeight | None = None  # with compiled kernels

    def on_torch(self, x: Tensor, wanted: int | None = None) -> Tensor:
        """``[.., T, H]`` -> ``[.., T, count]`` float32; zeros behind the first ``wanted`` rows, if given."""
        logits = float_logits(x.float(), self.slices, wanted)
        if self.bias is not None:
            logits[..., :wanted, :] += self.bias
        return logits


class WideHead:
    """Replaces ``head``'s forward: float32 logits from float32 products of a bfloat16 weight.

    With ``kernels`` (on a CPU) the weight is packed for the compiled product, which takes the bfloat16 as it is and
    treats each row by itself; that is several times faster, and the head of a small model is most of it. Without, a
    float32 copy is kept if it is not too large.
    """

    def __init__(self, head: nn.Linear, kernels: Kernels | None = None) -> None:
        self.rows: int | None = None  # logits are wanted for so many rows from the first on (None: all); rest: zeros
        self.plain = False  # True: leave the compiled product alone, for a comparison
        self.reduced: HeadColumns | None = None  # of :meth:`select`: the columns that are wanted, if not all
        self._kernels = kernels
        weight = head.weight.detach()
        bias = None if head.bias is None else head.bias.detach()
        self._weight = weight
        self._whole = HeadColumns(
            head.out_features,
            head_slices(weight) if kernels is None else list(weight.split(_SLICE)),
            None if bias is None else bias.float(),
            None if kernels is None else kernels.pack(weight, bias),
        )
        object.__setattr__(head, "forward", self)

    def __call__(self, x: Tensor) -> Tensor:
        """``[1, T, H]`` -> ``[1, T, V]`` float32."""
        columns = self._whole if self.reduced is None else self.reduced
        if self.rows == 0:
            return x.new_zeros((*x.shape[:-1], columns.count), dtype=torch.float32)
        rows = x.reshape(-1, x.shape[-1])
        if self._kernels is None or columns.packed is None or self.plain:
            return columns.on_torch(rows, self.rows).view(*x.shape[:-1], -1)
        wanted = self._kernels.matmul(rows[: self.rows].contiguous(), columns.packed)
        logits = wanted if len(wanted) == len(rows) else F.pad(wanted, (0, 0, 0, len(rows) - len(wanted)))
        return logits.view(*x.shape[:-1], -1)

    def select(self, token_ids: Tensor) -> HeadColumns:
        """The columns of ``token_ids`` ``[n]`` int64 alone; a copy."""
        whole = self._whole
        if self._kernels is None or whole.packed is None:
            return select_columns(self._weight, whole.bias, token_ids)
        return HeadColumns(len(token_ids), [], None, self._kernels.select(whole.packed, token_ids))


def head_slices(weight: Tensor) -> list[HeadSlice]:
    """Of the head's ``weight`` ``[V, H]``, for :func:`float_logits`: in float32 if a copy of that size may be kept."""
    if 4 * weight.numel() > _KEPT_BYTES:
        return list(weight.split(_SLICE))
    return [LinearWeight(part.float()) for part in weight.split(_SLICE)]


def select_columns(weight: Tensor, bias: Tensor | None, token_ids: Tensor) -> HeadColumns:
    """Of a head's ``weight`` ``[V, H]`` the columns of ``token_ids`` ``[n]`` int64; a float32 copy."""
    rows = weight[token_ids.to(weight.device)]
    chosen = None if bias is None else bias[token_ids.to(bias.device)]
    return HeadColumns(len(token_ids), [LinearWeight(part.float()) for part in rows.split(_SLICE)], chosen)


def float_logits(x: Tensor, slices: Sequence[HeadSlice], wanted: int | None = None) -> Tensor:
    """``x`` ``[.., T, H]`` float32 -> ``[.., T, V]``: products in float32, slice by slice.

    All rows are multiplied, since bits may depend on their number; behind the first ``wanted``, if given, are zeros.
    """
    logits = x.new_empty((*x.shape[:-1], num_columns(slices)))
    if wanted is not None:
        logits[..., wanted:, :] = 0.0
    first = 0
    for part in slices:
        found = part(x) if isinstance(part, LinearWeight) else F.linear(x, part.float())
        last = first + found.shape[-1]
        logits[..., :wanted, first:last] = found[..., :wanted, :]
        first = last
    return logits


def num_columns(slices: Sequence[HeadSlice]) -> int:
    return sum(part.num_columns if isinstance(part, LinearWeight) else len(part) for part in slices)
