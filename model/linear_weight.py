"""Weights of matrix products on torch, kept in the layout that oneDNN computes with.

``F.linear`` lays the weight out anew for every product. With few rows that takes longer than the product itself: 16
rows take half the time without it, in bfloat16 and in float32. Where oneDNN cannot be had the weight stays as it is.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROWS = 16  # that the layout is chosen for; it serves any number
_SECOND_COPY_BYTES = 1 << 30  # laid out weights beside those of a model that keeps its own


class LinearWeight:
    """``x [.., K] -> x @ weight.T + bias [.., N]``; ``weight`` ``[N, K]`` need not be kept.

    Whether a row's bits depend on the other rows is the probe's to say, as for any product of torch.
    """

    __slots__ = ("_bias", "_laid_out", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._laid_out = can_lay_out(weight)
        self._weight = lay_out(weight) if self._laid_out else weight
        self._bias = bias

    @property
    def num_columns(self) -> int:
        return int(self._weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        if self._laid_out:
            return product(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)


class LaidOutLinears:
    """Makes the ``nn.Linear`` of a model compute with laid out copies of their weights, until these take 1 GiB."""

    def __init__(self, modules: nn.Module, *, but: nn.Module | None = None) -> None:
        self._products: list[tuple[nn.Module, LinearWeight]] = []
        left = _SECOND_COPY_BYTES
        for module in modules.modules():
            if type(module) is not nn.Linear or module is but or not can_lay_out(module.weight):
                continue
            left -= module.weight.numel() * module.weight.element_size()
            if left < 0:
                break
            bias = None if module.bias is None else module.bias.detach()
            self._products.append((module, LinearWeight(module.weight.detach(), bias)))
        self.use()

    def use(self) -> None:
        for module, laid_out in self._products:
            object.__setattr__(module, "forward", laid_out)

    def leave(self) -> None:
        """The modules run their own code until the next :meth:`use`."""
        for module, _ in self._products:
            module.__dict__.pop("forward", None)


def can_lay_out(weight: Tensor) -> bool:
    """True if oneDNN takes this ``weight`` on this machine."""
    on_cpu = weight.device.type == "cpu" and weight.layout == torch.strided
    return on_cpu and weight.dim() == 2 and bool(torch.backends.mkldnn.enabled) and _computes(weight.dtype)


def lay_out(weight: Tensor) -> Tensor:
    """A copy of ``weight`` ``[N, K]`` for :func:`product`; an opaque tensor of the same shape."""
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return laid_out


def product(x: Tensor, laid_out: Tensor, bias: Tensor | None) -> Tensor:
    """``[.., K]`` -> ``[.., N]``, as ``F.linear``."""
    attributes: tuple[str, list[Any], str] = ("none", [], "")  # nothing is done to the result
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, laid_out, bias, *attributes)
    return result


@cache
def _computes(dtype: torch.dtype) -> bool:
    """Does oneDNN compute products of ``dtype`` here? Tried once: torch promises nothing about these operations."""
    if dtype not in (torch.bfloat16, torch.float32) or platform.machine() not in ("x86_64", "AMD64"):
        return False
    x = torch.linspace(-1, 1, 3 * 40).view(3, 40).to(dtype)
    weight = torch.linspace(2, -1, 24 * 40).view(24, 40).to(dtype)
    bias = torch.linspace(-3, 3, 24).to(dtype)
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        found = product(x, lay_out(weight), bias)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):  # whatever a torch without them says
        return False
    expected = F.linear(x.double(), weight.double(), bias.double())
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-18
    return found.dtype == dtype and torch.allclose(found.double(), expected, rtol=tolerance, atol=tolerance)
