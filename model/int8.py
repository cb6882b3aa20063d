"""Int8 weights, and what a product with them is: the definition that the compiled kernels and torch both compute.

::

    weight [n, k]    value = round(weight / scale), scale = max |row| / 127, one for each output channel n
    rows   [T, k]    the same, one scale for each GROUP elements of each row, taken anew in every product
    product [T, n]   sum over groups of (sum of value x value in the group) * scale of row and group, all * scale of n

A group's sum is a whole number that float32 holds exactly, so no order of adding changes it; the groups are added in
their order. A scale looks at its row alone. So a product has the same bits in any company and on either path.

One scale for a whole row would be simpler, and cost several times the quality (docs/quantization.md). A group whose
largest element is below ``TINY`` is a group of zeros; one with an element that is not finite makes its row NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.errors import ModelError

Quantize = Literal["none", "int8"]

GROUP = 64  # the kernels' kGroup
LARGEST = 127  # values are symmetric: -128 is not used
TINY = 1e-30  # below it 127 / max leaves float32's range


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight ``[n, k]``."""

    values: Tensor  # [n, k] int8, -127..127
    scales: Tensor  # [n] float32


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Rows ``[T, k]`` in ``g`` groups, the last one filled with zeros."""

    values: Tensor  # [T, g, GROUP] int8, -127..127
    scales: Tensor  # [T, g] float32; NaN if the group holds something that is not finite


def quantize_weight(weight: Tensor, name: str = "weight") -> Int8Weight:
    """``weight`` ``[n, k]`` of any float type. Raises ModelError, with its ``name``, for what int8 cannot hold."""
    values, scales = _quantize(weight)
    if not bool(torch.isfinite(scales).all()):
        raise ModelError(f"{name} holds values that are not finite, which int8 cannot hold")
    return Int8Weight(values, scales)


def quantize_rows(x: Tensor) -> Int8Rows:
    """``x`` ``[T, k]`` of any float type."""
    return Int8Rows(*_quantize(_grouped(x)))


def _grouped(x: Tensor) -> Tensor:
    """``[n, k]`` -> ``[n, g, GROUP]``, filled with zeros."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).view(len(x), -1, GROUP)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[.., m]`` -> values int8 and a scale for each ``m`` of them, ``[..]`` float32."""
    x = x.float()
    largest = x.abs().amax(-1)
    finite = torch.isfinite(largest)
    counts = finite & (largest >= TINY)
    # torch.div, because a number / tensor is computed as number * (1 / tensor).
    inverse = torch.where(counts, torch.div(torch.full_like(largest, LARGEST), largest), 0.0)
    scales = torch.where(counts, largest / LARGEST, torch.where(finite, 0.0, torch.nan))
    values = (x * inverse[..., None]).round_()
    if not bool(finite.all()):
        values[~finite] = 0.0
    return values.to(torch.int8), scales


class Int8Linear:
    """A linear layer on torch operations. ``keep_wide``: keep the values in float32 too, which is faster and takes
    four times the memory."""

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None, *, keep_wide: bool = True) -> None:
        self.weight = weight
        self.bias = None if bias is None else bias.float()
        groups = _grouped(weight.values).permute(1, 2, 0)  # [g, GROUP, n]
        self._groups = (groups.float() if keep_wide else groups).contiguous()

    @property
    def count(self) -> int:
        """Columns of the output."""
        return len(self.weight.scales)

    def __call__(self, rows: Int8Rows) -> Tensor:
        """``[T, k]`` -> ``[T, n]`` float32."""
        result = torch.zeros((len(rows.values), self.count), device=rows.values.device)
        for part, weight, scales in zip(rows.values.unbind(1), self._groups, rows.scales.unbind(1), strict=True):
            # Whole numbers below 2**24: no float32 product rounds, whatever its order.
            result += (part.float() @ weight.float()) * scales[:, None]
        result *= self.weight.scales
        return result if self.bias is None else result + self.bias

    def select(self, columns: Tensor) -> Int8Linear:
        """``columns`` ``[n]`` int64 of the output alone; a copy."""
        columns = columns.to(self.weight.scales.device)
        chosen = Int8Weight(self.weight.values[columns], self.weight.scales[columns])
        return Int8Linear(chosen, None if self.bias is None else self.bias[columns])
