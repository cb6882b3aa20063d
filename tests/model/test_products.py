"""Products that round otherwise for another number of rows are found, however seldom it shows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model.linear_weight
from model.linear_weight import LinearWeight, can_lay_out
from model.probe import probe_exactness
from model.products import RecordedProducts, differing_products
from tests.model.families import SERVABLE, build_executor

SEEN_AT_LEAST = 32768  # rows of a real scale, behind the choice of a tile


@contextmanager
def overriding(*kernels: tuple[str, str, Callable[..., Tensor], str]) -> Iterator[None]:
    """Each (namespace, operation, function, dispatch key): all of torch runs the function instead."""
    libraries = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it overrides a kernel is the point
        for namespace, name, function, key in kernels:
            libraries.append(torch.library.Library(namespace, "IMPL"))
            libraries[-1].impl(name, function, key)
    try:
        yield
    finally:
        for library in libraries:
            library._destroy()


@contextmanager
def sigmoid_with_a_rest() -> Iterator[None]:
    """All of torch computes sigmoids beyond the last 64 elements that fill a vector a little larger."""

    def sigmoid(x: Tensor) -> Tensor:
        found = 1.0 / (1.0 + torch.exp(-x))
        full = found.numel() // 64 * 64
        found.view(-1)[full:] *= 1.0 + 2.0**-20
        return found

    with overriding(("aten", "sigmoid", sigmoid, "CPU")):
        yield


@contextmanager
def linear_replaced_by(replacement: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """All of torch computes ``linear`` on the CPU by ``replacement``, with laid out weights too."""

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = replacement(inputs, weight)
        return found if bias is None else found + bias

    def laid_out(inputs: Tensor, weight: Tensor, bias: Tensor | None, *nothing: object) -> Tensor:
        return linear(inputs, weight.to_dense(), bias)

    with overriding(("aten", "linear", linear, "CPU"), ("mkldnn", "_linear_pointwise", laid_out, "MkldnnCPU")):
        yield


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """Summed one column after the other: the same for any number of rows."""
    total = torch.zeros((*x.shape[:-1], len(weight)))
    for k in range(weight.shape[1]):
        total += x[..., k, None].float() * weight[:, k].float()
    return total.to(x.dtype)


def backwards_for_many(x: Tensor, weight: Tensor) -> Tensor:
    """As a kernel that sums in another order when there are more than 16 rows."""
    if x.shape[:-1].numel() <= 16:
        return in_order(x, weight)
    return in_order(x.flip(-1), weight.flip(-1))


def backwards_at_a_place(x: Tensor, weight: Tensor) -> Tensor:
    """As a kernel with another loop for the last rows of a block."""
    found = in_order(x, weight)
    rows = found.view(-1, len(weight))
    rows[13:] = in_order(x.flip(-1), weight.flip(-1)).view(-1, len(weight))[13:]
    return found


def recorded(layer: nn.Module, *counts: int) -> RecordedProducts:
    together = RecordedProducts()
    for count in counts:
        with torch.inference_mode(), RecordedProducts() as found:
            layer(torch.zeros(1, count, 48, dtype=torch.bfloat16))
        together |= found
    return together


@pytest.fixture
def router() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 4, bias=False, dtype=torch.bfloat16)


def test_another_order_of_summing_that_one_row_in_hundreds_shows_is_found(router: nn.Linear) -> None:
    with linear_replaced_by(backwards_for_many), torch.inference_mode():
        rows = torch.randn(16384, 48).bfloat16()
        small = torch.cat([router(part) for part in rows.split(16)])
        odd = int((router(rows) != small).any(-1).sum())
        assert 0 < odd < len(rows) / 200  # so that whole forwards of some hundred rows tend to miss it
        assert list(differing_products(recorded(router, 16, 64))) == [
            "linear of 48 to 4 columns in bfloat16: 64 rows at a time gives other bits than 16"
        ]
        assert list(differing_products(recorded(router, 64, 256))) == []


def test_another_order_at_some_places_is_found(router: nn.Linear) -> None:
    with linear_replaced_by(backwards_at_a_place):
        (line,) = differing_products(recorded(router, 16))
        assert line.endswith("another place among the rows gives other bits than 16")


@pytest.mark.parametrize("laid_out", [True, False])
def test_the_probe_takes_no_tile_whose_products_differ_and_says_which_product_cares_for_a_place(
    laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not laid_out:
        monkeypatch.setattr(model.linear_weight, "_computes", lambda dtype: False)
    executor = build_executor("llama", "bfloat16", max_position_embeddings=64)
    with linear_replaced_by(in_order):
        report = probe_exactness(executor, budget=64)
        assert (report.level, report.tile_classes) == ("L0", (4, 8, 16, 64))
    with linear_replaced_by(backwards_for_many):
        report = probe_exactness(executor, budget=64)
        assert (report.level, report.tile_classes) == ("L0", (4, 8, 16))
    with linear_replaced_by(backwards_at_a_place):
        report = probe_exactness(executor, budget=64)
        assert (report.level, report.tile_classes) == ("L2", (16,))
        operation = "laid out" if can_lay_out(torch.zeros(32, 32, dtype=torch.bfloat16)) else "linear"
        assert f"matrix products: {operation} of 32 to " in report.detail


@pytest.mark.parametrize(("width", "sizes"), [(6, (16, 64)), (8, (8, 16, 64)), (16, (4, 8, 16, 64))])
def test_the_probe_takes_no_small_tile_whose_elements_fill_no_vector_if_that_matters(
    width: int, sizes: tuple[int, ...]
) -> None:
    executor = build_executor("llama", "bfloat16", max_position_embeddings=64)

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        # Looked at by nobody, so that no forward shows it.
        torch.sigmoid(args[0][..., :width].float().contiguous())

    executor.structure.layers[0].register_forward_hook(hook)
    with sigmoid_with_a_rest():
        assert probe_exactness(executor, budget=64).tile_classes == sizes


@contextmanager
def sigmoid_of_three_threads() -> Iterator[None]:
    """All of torch computes sigmoids that lie apart, and the last of the first of three shares, a little larger."""

    def sigmoid(x: Tensor) -> Tensor:
        found = 1.0 / (1.0 + torch.exp(-x))
        odd = slice(None)
        if x.is_contiguous():
            share = -(-found.numel() // 3)
            odd = slice(share // 64 * 64, share) if found.numel() > 4096 else slice(0)
        found.view(-1)[odd] *= 1.0 + 2.0**-20
        return found

    with overriding(("aten", "sigmoid", sigmoid, "CPU")):
        yield


@pytest.mark.parametrize(
    ("width", "level", "sizes"), [(60, "L0", (4, 8, 16, 64)), (100, "L0", (4, 8, 16)), (310, "L2", (4, 8, 16))]
)
def test_the_probe_sees_elements_at_the_borders_of_what_threads_share(
    width: int, level: str, sizes: tuple[int, ...]
) -> None:
    executor = build_executor("llama", "bfloat16", max_position_embeddings=64)

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        # Looked at by nobody, so that no forward shows it.
        torch.sigmoid(torch.zeros(args[0].shape[:-1].numel() * width))

    executor.structure.layers[0].register_forward_hook(hook)
    with sigmoid_of_three_threads():
        report = probe_exactness(executor, budget=64)
    assert (report.level, report.tile_classes) == (level, sizes)
    assert ("single elements: sigmoid in float32" in report.detail) == (level == "L2")


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt2", "gemma2"])
def test_the_tiles_of_the_probe_hold_for_many_thousand_rows_of_every_linear(family: str) -> None:
    executor = build_executor(family, "bfloat16", max_position_embeddings=256)
    classes = probe_exactness(executor, budget=256).tile_classes
    weights = {
        tuple(module.weight.shape): module.weight
        for module in executor.model.modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2
    }
    for (columns, size), weight in weights.items():
        if columns > 64:
            continue
        rows = torch.randn(SEEN_AT_LEAST, size, generator=torch.Generator().manual_seed(size)).bfloat16()
        linear = LinearWeight(weight.detach())
        base = torch.cat([linear(part) for part in rows.split(16)])
        for tile in classes:
            assert torch.equal(torch.cat([linear(part) for part in rows.split(tile)]), base)


@pytest.mark.parametrize("family", SERVABLE)
def test_every_product_of_a_family_is_seen_and_can_be_asked(family: str) -> None:
    executor = build_executor(family, "bfloat16", max_position_embeddings=64)
    report = probe_exactness(executor, budget=16)
    (check,) = [check for check in report.checks if check.name == "matrix products"]
    assert check.passed
    kinds = int(check.detail.split()[0])
    assert kinds >= 5  # attention has two beside those of the layers


def test_operations_that_are_made_of_products_are_taken_apart() -> None:
    x, weight, batch = torch.randn(16, 64), torch.randn(64, 32), torch.randn(3, 64, 32)
    with torch.inference_mode(), RecordedProducts() as found:
        assert torch.equal(x @ weight, torch.mm(x, weight))
        torch.stack([x, x, x]) @ batch
        torch.baddbmm(torch.zeros(32), torch.stack([x, x, x]), batch)
        F.linear(x.view(2, 8, 64), weight.T, torch.zeros(32))
        torch.addmm(torch.zeros(32), x, weight)
    assert {product.operation for product in found.found} == {"mm", "bmm", "baddbmm", "linear", "addmm"}
    assert {rows for inputs in found.found.values() for rows in inputs} == {16}
    assert list(differing_products(found)) == []
