"""Do matrix products of some numbers of rows give a row the same bits? Every product of a forward is asked by itself.

A kernel that sums in another order changes a bfloat16 output only where the float32 sum lies at a rounding border:
once in some ten thousand outputs, which whole forwards of a few rows do not meet. Here the inputs come in pairs that
cancel, so the exact result is 0 and all that is left is the rounding of the sums, which another order changes almost
always::

    x = [ a  b -a  c -b -c ]   (places shuffled)
    w = [ p  q  p  r  q  r ]   x . w = 0, computed 3e-7 in one order and -1e-7 in another
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.linear_weight import lay_out
from model.linear_weight import product as laid_out_product

_ROWS = 512  # compared for each product, at least
_SHIFTS = (0, 1, 5)  # rows that come before: another place in the tile for each
_ELEMENTS = 4096  # compared for each operation on single elements
_VECTORS = 64  # elements that fill every vector unit, a few of them at once
_FULL = (_ELEMENTS, _ELEMENTS // 4)  # elements that fill vectors, of a single thread
# These look at more than one element, or at none.
_OF_ROWS = ("_softmax", "cumsum", "_log_softmax", "softmax", "cumprod", "flip", "roll", "empty_like")
_TRANSPOSED = ("linear", "laid out")  # the weight is [N, K]
_SCALE = 2.0**-20  # of a bias: larger ones would swallow what is left of the sums


@dataclass(frozen=True, slots=True)
class Layout:
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tuple(tensor.shape), tuple(tensor.stride()))

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor that lies in memory like the one described; contiguous if that one's elements shared places."""
        if any(stride == 0 and size > 1 for size, stride in zip(self.shape, self.strides, strict=True)):
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class Product:
    """What decides about a kernel beside the rows: the operation ``[.., rows, K] x weight -> [.., rows, N]``.

    A laid out weight has no strides that mean anything, and its layout follows from its shape.
    """

    operation: str  # "linear", "laid out" (of model.linear_weight), "mm", "addmm", "bmm", "baddbmm"
    dtype: torch.dtype
    device: torch.device
    weight: Layout
    has_bias: bool

    @property
    def reduced(self) -> int:
        """K."""
        return self.weight.shape[-1 if self.operation in _TRANSPOSED else -2]

    @property
    def columns(self) -> int:
        """N."""
        return self.weight.shape[-2 if self.operation in _TRANSPOSED else -1]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation} of {self.reduced} to {self.columns} columns in {dtype}"


class RecordedProducts(TorchDispatchMode):
    """While it is entered, notes each kind of matrix product that runs, with the inputs it ran on by number of rows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Product, dict[int, Layout]] = {}
        self.pointwise: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, set[int]]] = {}  # numbers of elements

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__ if function.namespace in ("aten", "mkldnn") else ""
        match name:
            case "_linear_pointwise":
                self._note("laid out", args[0], args[1], args[2] is not None)
            case "matmul":  # made of the others
                with self:
                    return function.decompose(*args)
            case "linear":
                self._note(name, args[0], args[1], len(args) > 2 and args[2] is not None)
            case "mm" | "bmm":
                self._note(name, args[0], args[1], has_bias=False)
            case "addmm" | "baddbmm":
                self._note(name, args[1], args[2], has_bias=True)
        result = function(*args, **(kwargs or {}))
        if function.namespace == "aten" and isinstance(result, Tensor) and result.is_floating_point():
            self._note_pointwise(function, args, kwargs or {}, result)
        return result

    def _note_pointwise(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Note an operation on the elements of one tensor, so far as that shows."""
        x, *rest = args or (None,)
        if not isinstance(x, Tensor) or x.shape != result.shape or x.dtype != result.dtype or x.device.type != "cpu":
            return
        if any(isinstance(value, Tensor) for value in (*rest, *kwargs.values())) or function.is_view:
            return
        if any(isinstance(value, list) for value in rest) or function.overloadpacket.__name__ in _OF_ROWS:
            return
        name = f"{function.overloadpacket.__name__} in {str(x.dtype).removeprefix('torch.')}{rest or ''}"
        call = partial(_call, function, rest, kwargs)
        self.pointwise.setdefault(name, (call, x.dtype, set()))[2].add(x.numel())

    def _note(self, name: str, inputs: Tensor, weight: Tensor, has_bias: bool) -> None:
        if _rounds_nowhere(inputs, weight):
            return
        product = Product(name, inputs.dtype, inputs.device, Layout.of(weight), has_bias)
        self.found.setdefault(product, {})[_rows(product, inputs.shape)] = Layout.of(inputs)

    def __or__(self, other: RecordedProducts) -> RecordedProducts:
        both = RecordedProducts()
        for product in self.found | other.found:
            both.found[product] = self.found.get(product, {}) | other.found.get(product, {})
        for name, (call, dtype, counts) in (*self.pointwise.items(), *other.pointwise.items()):
            both.pointwise.setdefault(name, (call, dtype, set()))[2].update(counts)
        return both


def _rounds_nowhere(inputs: Tensor, weight: Tensor) -> bool:
    """Whole numbers whose sums of products float32 holds exactly, as those of int8 products: no order can show."""
    operands = (inputs, weight)
    if any(one.dtype != torch.float32 or one.layout != torch.strided or not one.numel() for one in operands):
        return False
    largest = inputs.shape[-1] * math.prod(float(one.abs().max()) for one in operands)
    return largest < 2**24 and all(torch.equal(one, one.round()) for one in operands)


def _rows(product: Product, shape: Iterable[int]) -> int:
    """Rows of an input of this shape: all that share the weight, or those of one matrix of a batch."""
    *leading, rows, _ = shape
    return rows if product.operation in ("bmm", "baddbmm") else math.prod(leading) * rows


@torch.inference_mode()
def differing_products(recorded: RecordedProducts) -> Iterator[str]:
    """Of each product that gives some row other bits in another place or among another number of rows, one line."""
    for product, inputs in recorded.found.items():
        counts = sorted(inputs)
        rows = math.lcm(*counts)
        rows *= -(-_ROWS // rows)
        sample = _Sample(product, rows)
        expected = sample.run(inputs[counts[0]], counts[0], 0)
        for count in counts:
            odd = [shift for shift in _SHIFTS if not torch.equal(sample.run(inputs[count], count, shift), expected)]
            if odd:
                where = f"{count} rows at a time" if 0 in odd else "another place among the rows"
                yield f"{product}: {where} gives other bits than {counts[0]}"
                break


@torch.inference_mode()
def differing_pointwise(recorded: RecordedProducts) -> Iterator[str]:
    """Of each operation on single elements that rounds the last of some number of them otherwise, one line.

    torch computes what does not fill a vector in another loop, for some operations by another function. Tiles of 16
    rows fill vectors if the width is even; smaller ones need not.
    """
    for name, (call, dtype, counts) in recorded.pointwise.items():
        x = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(3)).mul_(3).to(dtype)
        try:
            expected = call(x.clone())
        except (RuntimeError, IndexError):  # it wants rows and columns
            continue
        if expected.shape != x.shape:
            continue
        for count in sorted(counts):
            if count % _VECTORS == 0 or count > _ELEMENTS:
                continue
            whole = _ELEMENTS // count * count
            found = torch.cat([call(part.clone()) for part in x[:whole].split(count)])
            if not torch.equal(found.nan_to_num(), expected[:whole].nan_to_num()):
                yield f"{name}: {count} elements at a time give other bits than a full vector"
                break


@torch.inference_mode()
def differing_places(recorded: RecordedProducts) -> Iterator[str]:
    """Of each operation on single elements that rounds some value otherwise at some places of a tensor, one line.

    torch computes what does not fill a vector in another loop at the end of each thread's share as well, and where five
    threads share a tile, that is in the middle of some row. Few values of bfloat16 show it. Elements that lie apart in
    memory take that loop too, which tells such a value.
    """
    for name, (call, dtype, counts) in recorded.pointwise.items():
        x = _values(dtype)
        try:
            full, again = (torch.cat([call(part.clone()) for part in x.split(size)]).nan_to_num() for size in _FULL)
            apart = call(x.repeat_interleave(2)[::2]).nan_to_num()
        except (RuntimeError, IndexError):  # it wants rows and columns
            continue
        if full.shape != x.shape or apart.shape != x.shape or not torch.equal(full, again):
            continue  # it looks at more than one element
        for odd in (full != apart).nonzero().flatten()[:1].tolist():
            for count in sorted(counts):
                found = call(x[odd].repeat(count)).nan_to_num()
                if not bool((found == full[odd]).all()):
                    yield f"{name}: some of {count} elements have other bits than those of a full vector"
                    break


def _values(dtype: torch.dtype) -> Tensor:
    """All that are finite of bfloat16, some of other types."""
    if dtype != torch.bfloat16:
        return torch.randn(2**16, generator=torch.Generator().manual_seed(3)).mul_(3).to(dtype)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


def _call(function: Any, rest: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor) -> Tensor:
    result: Tensor = function(x, *rest, **kwargs)
    return result


class _Sample:
    """``rows`` rows and a weight whose products cancel, for one product."""

    def __init__(self, product: Product, rows: int) -> None:
        self._product = product
        generator = torch.Generator().manual_seed(product.reduced * 8191 + product.columns)
        batch = product.weight.shape[:-2]
        size = product.reduced
        x = torch.randn((*batch, rows, size), generator=generator).to(product.dtype)
        w = torch.randn((*batch, product.columns, size), generator=generator).to(product.dtype)
        places = torch.randperm(size, generator=generator)
        one, other = places[: size // 2], places[size // 2 : 2 * (size // 2)]
        x[..., other] = -x[..., one]
        w[..., other] = w[..., one]
        if size % 2:
            x[..., places[-1]] *= _SCALE
        self._x = x.to(product.device)
        if product.operation == "laid out":
            self._weight = lay_out(w)
        else:
            self._weight = product.weight.empty(product.dtype, product.device)
            self._weight.copy_(w if product.operation == "linear" else w.transpose(-1, -2))
        self._bias = None
        if product.has_bias:
            bias = torch.randn(product.columns, generator=generator) * _SCALE
            self._bias = bias.to(product.dtype).to(product.device)

    def run(self, layout: Layout, count: int, shift: int) -> Tensor:
        """All rows, ``count`` at a time, in tensors that lie like ``layout``; each row ``shift`` places later."""
        parts = []
        for part in self._x.roll(shift, dims=-2).split(count, dim=-2):
            inputs = layout.empty(self._product.dtype, self._product.device)
            inputs.copy_(part.reshape(layout.shape))
            result = self._multiply(inputs)
            parts.append(result.reshape(*part.shape[:-1], self._product.columns))
        return torch.cat(parts, dim=-2).roll(-shift, dims=-2)

    def _multiply(self, inputs: Tensor) -> Tensor:
        bias = self._bias
        match self._product.operation:
            case "linear":
                return torch.nn.functional.linear(inputs, self._weight, bias)
            case "laid out":
                return laid_out_product(inputs, self._weight, bias)
            case "mm":
                return torch.mm(inputs, self._weight)
            case "bmm":
                return torch.bmm(inputs, self._weight)
            case "addmm":
                assert bias is not None
                return torch.addmm(bias, inputs, self._weight)
            case _:
                assert bias is not None
                return torch.baddbmm(bias, inputs, self._weight)
