"""Early exit: the first layers of a model alone write what they write in a whole forward, and feed the head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvcache.storage import KVStorage
from model.batch import PackedBatch, RowSpan
from model.errors import ModelError
from model.generic import GenericExecutor
from model.int8 import Quantize
from model.interface import ExitExecutor, ForwardOutput, ReducedHead
from model.kernels.ops import Kernels
from model.wrapped import WrappedExecutor
from tests.model.families import SERVABLE, build_executor
from tests.model.kernel_builders import DTYPES, fused_executor, need_kernels, random, tiny_model, token_ids

BACKENDS = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
SIZE = 4
IDS = token_ids([29, 6, 1], 97)


class Paged:
    """Three sequences on scattered blocks; slots that were not written are NaN."""

    def __init__(self, executor: ExitExecutor) -> None:
        self.executor = executor
        counts = [-(-len(ids) // SIZE) for ids in IDS]
        self.storage = KVStorage(executor.planes, num_blocks=sum(counts), block_size=SIZE)
        for name in self.storage.names:
            self.storage.plane(name).fill_(float("nan"))
        blocks = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist())
        self.tables = [[next(blocks) for _ in range(count)] for count in counts]
        executor.bind(self.storage)

    def forward(
        self, *rows: tuple[int, int, int], num_layers: int | None = None, head: ReducedHead | None = None
    ) -> ForwardOutput:
        """``rows``: (sequence, first position, count)."""
        spans = [RowSpan(IDS[s][at : at + n], at, self.tables[s], 0) for s, at, n in rows]
        batch = PackedBatch.build(spans, block_size=SIZE, scratch_block=self.storage.scratch_block)
        return self.executor.forward(batch, capture_layers=True, num_layers=num_layers, head=head)

    def planes(self) -> list[torch.Tensor]:
        return [self.storage.plane(spec.name) for spec in self.executor.planes]


ALL = [(s, 0, len(ids)) for s, ids in enumerate(IDS)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def fused(name: str, dtype: torch.dtype, kernels: bool, quantize: Quantize = "none") -> ExitExecutor:
    executor = fused_executor(tiny_model(name, dtype), kernels=kernels, quantize=quantize)
    assert isinstance(executor, ExitExecutor)
    return executor


def assert_cut(executor: ExitExecutor, depth: int) -> None:
    """Layers, K and V of the first ``depth`` layers equal a whole forward's, and nothing else is written."""
    executor.check_exit(depth)
    whole = Paged(executor)
    expected = whole.forward(*ALL).layers
    cut = Paged(executor)
    found = cut.forward(*ALL, num_layers=depth).layers
    assert expected is not None
    assert found is not None
    assert torch.equal(found, expected[:depth])
    for i, (theirs, ours) in enumerate(zip(whole.planes(), cut.planes(), strict=True)):
        if i < 2 * depth:
            assert torch.equal(bits(ours), bits(theirs)), i
        else:
            assert torch.isnan(ours).all(), i


@BACKENDS
@DTYPE
@pytest.mark.parametrize("name", ["llama", "qwen2-some-sliding", "qwen3"])
def test_the_first_layers_alone_write_the_bits_of_a_whole_forward(name: str, dtype: torch.dtype, kernels: bool) -> None:
    for depth in (1, 2, 3):
        assert_cut(fused(name, dtype, kernels), depth)


@pytest.mark.parametrize("family", list(SERVABLE))
def test_every_servable_family_can_stop_early(family: str) -> None:
    assert_cut(build_executor(family), 1)


def test_a_generic_bfloat16_model_can_stop_early() -> None:
    assert_cut(build_executor("llama", "bfloat16"), 1)


EXECUTORS: tuple[tuple[str, torch.dtype, bool, Quantize], ...] = (
    ("llama", torch.bfloat16, True, "none"),
    ("qwen2", torch.float32, True, "none"),
    ("llama", torch.bfloat16, False, "none"),
    ("qwen2", torch.float32, False, "none"),
    ("qwen2", torch.bfloat16, True, "int8"),
    ("llama", torch.float32, False, "int8"),
)


def executors() -> list[tuple[str, ExitExecutor]]:
    found: list[tuple[str, ExitExecutor]] = [
        (f"{name} {dtype} {kernels} {quantize}", fused(name, dtype, kernels, quantize))
        for name, dtype, kernels, quantize in EXECUTORS
    ]
    return [*found, *((f"generic {dtype}", build_executor("llama", dtype)) for dtype in ("bfloat16", "float32"))]


def test_a_row_of_the_first_layers_is_the_same_alone_and_in_any_batch() -> None:
    for name, executor in executors():
        head = executor.reduce_head(range(5, 70))
        packed = Paged(executor)
        together = packed.forward(*ALL, num_layers=2, head=head).logits
        single = Paged(executor)
        alone = [
            single.forward((s, at, 1), num_layers=2, head=head).logits
            for s, ids in enumerate(IDS)
            for at in range(len(ids))
        ]
        assert torch.equal(torch.cat(alone), together), name
        for ours, theirs in zip(single.planes()[:4], packed.planes()[:4], strict=True):
            assert torch.equal(bits(ours), bits(theirs)), name


def test_a_verify_forward_writes_the_bits_that_the_draft_forwards_wrote() -> None:
    for name, executor in executors():
        paged = Paged(executor)
        paged.forward((0, 0, 20), (1, 0, 3))
        for at in range(3):
            paged.forward((0, 20 + at, 1), (1, 3 + at, 1), num_layers=1)
        drafted = [plane.clone() for plane in paged.planes()]
        logits = paged.forward((0, 20, 3), (1, 3, 3)).logits
        for before, after in zip(drafted[:2], paged.planes()[:2], strict=True):
            assert torch.equal(bits(before), bits(after)), name
        plain = Paged(executor)
        plain.forward((0, 0, 20), (1, 0, 3))
        assert torch.equal(plain.forward((0, 20, 3), (1, 3, 3)).logits, logits), name


def test_a_reduced_head_gives_the_columns_of_the_whole_one() -> None:
    ids = [90, 3, 4, 31, 32, 33, 64, 95]
    for name, executor in executors():
        head = executor.reduce_head(ids)
        assert head.token_ids.tolist() == sorted(ids)
        for depth in (1, None):
            whole = Paged(executor).forward(*ALL, num_layers=depth).logits[:, sorted(ids)]
            reduced = Paged(executor).forward(*ALL, num_layers=depth, head=head).logits
            if " True " in name or name.endswith("int8"):
                assert torch.equal(reduced, whole), name
            else:  # another width may take torch's product another way
                torch.testing.assert_close(reduced, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2", "phi", "gpt2"])
def test_what_a_model_does_to_its_logits_is_done_to_the_reduced_ones(family: str) -> None:
    for dtype in ("float32", "bfloat16"):
        executor = build_executor(family, dtype)
        head = executor.reduce_head(range(0, 90, 3))
        whole = Paged(executor).forward(*ALL, num_layers=1).logits[:, head.token_ids]
        reduced = Paged(executor).forward(*ALL, num_layers=1, head=head).logits
        torch.testing.assert_close(reduced, whole, rtol=1e-5, atol=1e-5)


@DTYPE
def test_selected_columns_equal_those_packed_from_their_rows(dtype: torch.dtype) -> None:
    kernels: Kernels = need_kernels()
    weight, bias = random(131, 45, dtype=dtype), random(131, seed=1)
    columns = torch.tensor([0, 5, 31, 32, 63, 64, 100, 130, *range(70, 99)])
    for own in (None, bias):
        chosen = kernels.select(kernels.pack(weight, own), columns)
        expected = kernels.pack(weight[columns], None if own is None else own[columns])
        assert torch.equal(chosen.data, expected.data)
        assert chosen.columns == expected.columns == len(columns)
        if own is not None:
            assert chosen.bias is not None
            assert expected.bias is not None
            assert torch.equal(chosen.bias, expected.bias)


def test_a_depth_or_ids_that_the_model_lacks_are_refused() -> None:
    for _, executor in executors():
        paged = Paged(executor)
        for depth in (0, executor.info.num_layers + 1):
            with pytest.raises(ModelError, match=f"after {depth} layers"):
                executor.check_exit(depth)
            with pytest.raises(ModelError, match=f"after {depth} layers"):
                paged.forward(*ALL, num_layers=depth)
        for ids in ([], [1, 1], [-1], [executor.info.vocab_size]):
            with pytest.raises(ValueError, match="distinct ids"):
                executor.reduce_head(ids)


def test_a_model_that_does_not_run_through_its_list_is_refused() -> None:
    executor = build_executor("llama")
    object.__setattr__(executor.structure, "stack", nn.ModuleList(nn.Identity() for _ in range(2)))
    with pytest.raises(ModelError, match="llama cannot stop after 1 layers"):
        executor.check_exit(1)
    executor.check_exit(2)


def test_a_model_whose_first_layers_depend_on_the_others_is_refused() -> None:
    executor = build_executor("llama")
    stack = executor.structure.stack
    stack[0].mlp.register_forward_hook(lambda module, args, output: output * len(stack))
    with pytest.raises(ModelError, match="something else"):
        executor.check_exit(1)


def test_a_head_that_is_no_linear_layer_is_not_cut() -> None:
    executor = build_executor("llama")
    object.__setattr__(executor.structure, "head", nn.Identity())
    with pytest.raises(ModelError, match="head is a Identity"):
        executor.reduce_head([1, 2])


def test_a_generic_model_is_whole_again_after_an_exit_also_if_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("float32", "bfloat16"):
        executor = build_executor("llama", dtype)
        head = executor.reduce_head([1, 2, 3])
        expected = Paged(executor).forward(*ALL).logits
        Paged(executor).forward(*ALL, num_layers=1, head=head)
        assert torch.equal(Paged(executor).forward(*ALL).logits, expected)

        def fails(module: nn.Module, args: object) -> None:
            raise RuntimeError("planted")

        hook = executor.structure.head.register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="planted"):
            Paged(executor).forward(*ALL, num_layers=1, head=head)
        hook.remove()
        assert torch.equal(Paged(executor).forward(*ALL).logits, expected)


def test_check_exit_leaves_the_bound_storage_alone() -> None:
    executor: GenericExecutor = build_executor("llama")
    paged = Paged(executor)
    executor.check_exit(1)
    assert executor.storage is paged.storage
    assert all(torch.isnan(plane).all() for plane in paged.planes())


def test_a_wrapped_executor_passes_an_exit_through() -> None:
    inner = build_executor("llama")
    wrapped = WrappedExecutor(inner)
    head = wrapped.reduce_head([1, 4, 9])
    wrapped.check_exit(1)
    expected = Paged(inner).forward(*ALL, num_layers=1, head=head)
    found = Paged(wrapped).forward(*ALL, num_layers=1, head=head)
    assert torch.equal(found.logits, expected.logits)
