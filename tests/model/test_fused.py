"""The fused executor on tiny random models: equal to Hugging Face, and each row independent of its batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoConfig, Gemma2Config, LlamaConfig

from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch, RowSpan
from model.errors import ModelError
from model.fused import FusedExecutor, FusedSpec, supports, unsupported_reason
from model.fused_rope import RopeTable
from model.fused_weights import collect_weights
from model.interface import TiledExecutor
from model.probe import probe_exactness
from tests.model.kernel_builders import (
    TINY_CONFIGS,
    PagedRun,
    fused_executor,
    need_kernels,
    random,
    tiny_model,
    token_ids,
)

BACKENDS = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS = pytest.mark.parametrize("name", list(TINY_CONFIGS))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@BACKENDS
@MODELS
def test_float32_logits_equal_hugging_face_eager(name: str, kernels: bool, one_thread: None) -> None:
    model = tiny_model(name)
    run = PagedRun(fused_executor(model, kernels=kernels), token_ids([70, 9, 1], 131), block_size=4)
    run.forward([(0, 0, 33), (1, 0, 9)])
    out = run.forward([(2, 0, 1), (0, 33, 37)])
    assert out.layers is not None
    with torch.inference_mode():
        expected = model(torch.tensor([run.sequences[0]]), output_hidden_states=True)
        alone = model(torch.tensor([run.sequences[2]])).logits[0]
    torch.testing.assert_close(out.logits[1:], expected.logits[0, 33:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.logits[:1], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.layers[0, 1:], expected.hidden_states[1][0, 33:], rtol=1e-4, atol=1e-4)
    assert out.hidden is not None
    torch.testing.assert_close(out.hidden[1:], expected.hidden_states[-1][0, 33:], rtol=1e-4, atol=1e-4)


@BACKENDS
@MODELS
def test_bfloat16_logits_are_as_near_to_float32_as_hugging_faces(name: str, kernels: bool, one_thread: None) -> None:
    model = tiny_model(name, torch.bfloat16)
    run = PagedRun(fused_executor(model, kernels=kernels), token_ids([40], 131), block_size=4)
    found = run.forward([(0, 0, 40)]).logits.double()
    with torch.inference_mode():
        ids = torch.tensor(run.sequences)
        theirs = model(ids).logits[0].double()
        exact = model.float()(ids).logits[0].double()
    own_error = (found - exact).norm() / exact.norm()
    their_error = (theirs - exact).norm() / exact.norm()
    assert own_error < 1.2 * their_error + 1e-3


Rows = list[tuple[int, int, int]]


def assert_rows_equal_one_row_decodes(
    executor: FusedExecutor, lengths: list[int], plans: list[list[Rows]], block_sizes: tuple[int, ...]
) -> None:
    """Logits and layer outputs of all rows of ``plans`` (each a list of forwards) against one-row forwards."""
    sequences = token_ids(lengths, 131)
    alone = PagedRun(executor, sequences, block_size=16).one_by_one()
    for block_size in block_sizes:
        for plan in plans:
            run = PagedRun(executor, sequences, block_size=block_size, seed=block_size)
            for rows in plan:
                out = run.forward(rows)
                assert out.layers is not None
                positions = [(s, position) for s, at, n in rows for position in range(at, at + n)]
                for index, (s, position) in enumerate(positions):
                    logits, layers = alone[s][position]
                    assert torch.equal(out.logits[index], logits), (block_size, rows, s, position)
                    assert torch.equal(out.layers[:, index], layers), (block_size, rows, s, position)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@MODELS
def test_verify_rows_are_bit_equal_to_one_row_decodes_layer_by_layer(name: str, dtype: torch.dtype) -> None:
    executor = fused_executor(tiny_model(name, dtype), kernels=True)
    whole: list[Rows] = [[(0, 0, 70)], [(1, 0, 18), (2, 0, 3)]]
    mixed: list[Rows] = [  # chunks of a prompt beside verified drafts
        [(1, 0, 1), (0, 0, 61), (2, 0, 2)],
        [(0, 61, 9), (1, 1, 7), (2, 2, 1)],
        [(1, 8, 10)],
    ]
    assert_rows_equal_one_row_decodes(executor, [70, 18, 3], [whole, mixed], (1, 4, 16, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@MODELS
def test_verify_rows_are_bit_equal_to_one_row_decodes_on_torch(name: str, dtype: torch.dtype, one_thread: None) -> None:
    executor = fused_executor(tiny_model(name, dtype), kernels=False)
    mixed: list[Rows] = [[(1, 0, 1), (0, 0, 20), (2, 0, 2)], [(0, 20, 9), (1, 1, 7), (2, 2, 1)]]
    assert_rows_equal_one_row_decodes(executor, [29, 8, 3], [mixed], (1, 16))


def test_torch_path_gives_the_same_rows_in_every_tile_that_the_probe_accepts(one_thread: None) -> None:
    executor = fused_executor(tiny_model("llama", torch.bfloat16), kernels=False)
    assert isinstance(executor, TiledExecutor)
    sequences = token_ids([90], 131)
    expected = PagedRun(executor, sequences, block_size=16).forward([(0, 0, 90)])
    report = probe_exactness(executor, budget=128)
    assert report.level == "L0", report.detail
    assert executor.tile_classes == report.tile_classes
    found = PagedRun(executor, sequences, block_size=16).forward([(0, 0, 90)])
    assert torch.equal(found.logits, expected.logits)


def test_compiled_path_has_no_tiles() -> None:
    assert not isinstance(fused_executor(tiny_model("llama"), kernels=True), TiledExecutor)


def test_what_another_model_left_in_the_working_memory_changes_nothing() -> None:
    odd = tiny_model("llama-biased-llama3-rope", torch.bfloat16)  # odd sizes: rows are padded
    sequences = token_ids([20], 131)
    expected = PagedRun(fused_executor(odd, kernels=True), sequences, block_size=4).forward([(0, 0, 20)]).logits
    broken = tiny_model("llama", torch.bfloat16)
    torch.nn.init.constant_(broken.model.layers[0].mlp.up_proj.weight, float("nan"))
    poisoned = PagedRun(fused_executor(broken, kernels=True), sequences, block_size=4).forward([(0, 0, 20)]).logits
    assert poisoned.isnan().all()
    again = PagedRun(fused_executor(odd, kernels=True), sequences, block_size=4).forward([(0, 0, 20)]).logits
    assert torch.equal(again, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_thread_count_changes_no_bit(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype)
    sequences = token_ids([130, 40], 131)
    outputs = []
    for threads in (1, 2, 3):
        run = PagedRun(fused_executor(model, kernels=True, num_threads=threads), sequences, block_size=16)
        run.forward([(0, 0, 128)])
        outputs.append(run.forward([(0, 128, 2), (1, 0, 40)]))
    for other in outputs[1:]:
        assert torch.equal(other.logits, outputs[0].logits)
        assert other.layers is not None
        assert outputs[0].layers is not None
        assert torch.equal(other.layers, outputs[0].layers)


@BACKENDS
def test_rejected_slots_and_free_blocks_may_hold_nan(kernels: bool) -> None:
    executor = fused_executor(tiny_model("mistral-sliding", torch.bfloat16), kernels=kernels)
    sequences = token_ids([30], 131)
    clean = PagedRun(executor, sequences, block_size=4)
    clean.forward([(0, 0, 20)])
    expected = clean.forward([(0, 20, 3)]).logits
    run = PagedRun(executor, sequences, block_size=4)  # poison in everything unwritten
    run.forward([(0, 0, 28)])
    for name in run.storage.names:  # positions 20.. were drafts, and are rejected
        for position in range(20, 28):
            slot = run.tables[0][position // 4] * 4 + position % 4
            run.storage.plane(name)[slot] = float("nan")
    assert torch.equal(run.forward([(0, 20, 3)]).logits, expected)


@BACKENDS
def test_only_the_wanted_logits_rows_come_back_in_order(kernels: bool) -> None:
    executor = fused_executor(tiny_model("qwen3"), kernels=kernels)
    run = PagedRun(executor, token_ids([33, 5], 131), block_size=4)
    everything = run.forward([(0, 0, 33), (1, 0, 5)])
    spans = [RowSpan(run.sequences[0], 0, run.tables[0], 31), RowSpan(run.sequences[1], 0, run.tables[1], 5)]
    some = executor.forward(PackedBatch.build(spans, block_size=4, scratch_block=run.storage.scratch_block))
    assert torch.equal(some.logits, everything.logits[31:33])
    assert some.layers is None
    spans = [RowSpan(run.sequences[1], 0, run.tables[1], 5)]
    none = executor.forward(PackedBatch.build(spans, block_size=4, scratch_block=run.storage.scratch_block))
    assert none.logits.shape == (0, 131)


@BACKENDS
def test_planes_and_kind_describe_the_executor(kernels: bool) -> None:
    executor = fused_executor(tiny_model("llama", torch.bfloat16), kernels=kernels)
    assert executor.planes[0] == PlaneSpec("target.0.k", (2, 16), torch.bfloat16)
    assert [plane.name for plane in executor.planes[-2:]] == ["target.2.k", "target.2.v"]
    assert executor.kind == ("fused/cpu-avx512bf16" if kernels else "fused/torch")


def test_storage_of_another_geometry_is_refused() -> None:
    executor = fused_executor(tiny_model("llama"), kernels=False)
    planes = [PlaneSpec(plane.name, (2, 8), plane.dtype) for plane in executor.planes]
    with pytest.raises(ValueError, match=r"plane target.0.k holds \(2, 8\)"):
        executor.bind(KVStorage(planes, num_blocks=1, block_size=4))


def test_ids_outside_of_the_embedding_are_refused() -> None:
    run = PagedRun(fused_executor(tiny_model("llama"), kernels=True), [[3, 131]], block_size=4)
    with pytest.raises(RuntimeError, match=r"input_ids\[1\] = 131 is outside 0..130"):
        run.forward([(0, 0, 2)])


def test_gil_is_released_during_a_forward() -> None:
    kernels = need_kernels()
    weight = kernels.pack(random(4096, 2048, dtype=torch.bfloat16))
    rows = random(400, 2048, dtype=torch.bfloat16)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        for _ in range(4):
            begin = time.perf_counter()
            kernels.matmul(rows, weight, threads=1)
            spans.append((begin, time.perf_counter()))

    worker = threading.Thread(target=work)
    worker.start()
    ticks = []
    while worker.is_alive():
        ticks.append(time.perf_counter())
    worker.join()
    inside = [sum(begin < tick < end for tick in ticks) for begin, end in spans]
    assert max(inside) > 100  # with the GIL held, this thread would stand still during every call


def test_cosines_of_a_position_do_not_depend_on_how_far_the_table_reaches() -> None:
    spec = FusedSpec.from_config(TINY_CONFIGS["qwen3"])
    short, long = RopeTable(spec), RopeTable(spec)
    first = [table.clone() for table in short.upto(3)]
    long.upto(5000)
    for a, b in zip(first, long.upto(7), strict=True):
        assert torch.equal(a, b[: len(a)])


@MODELS
def test_families_are_supported(name: str) -> None:
    assert supports(TINY_CONFIGS[name])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(), "model type 'gemma2'"),
        (LlamaConfig(hidden_act="gelu"), "activation 'gelu'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope type 'dynamic'",
        ),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), "quantised"),
    ],
)
def test_anything_not_understood_is_left_to_the_generic_executor(config: AutoConfig, reason: str) -> None:
    assert reason in (unsupported_reason(config) or "")
    assert not supports(config)


def test_missing_or_misshapen_weights_are_named() -> None:
    spec = FusedSpec.from_config(TINY_CONFIGS["qwen2"])
    state = dict(tiny_model("qwen2").state_dict())
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"][:5]
    with pytest.raises(ModelError, match=r"layers.1.mlp.up_proj.weight has shape \(5, 48\)"):
        collect_weights(spec, state)
    del state["model.layers.0.self_attn.q_proj.bias"]
    with pytest.raises(ModelError, match=r"no model.layers.0.self_attn.q_proj.bias"):
        collect_weights(spec, state)


@BACKENDS
def test_only_torch_needs_masks_and_says_what_they_took(kernels: bool, one_thread: None) -> None:
    run = PagedRun(fused_executor(tiny_model("llama"), kernels=kernels), token_ids([20], 131), block_size=4)
    first = run.forward([(0, 0, 19)]).mask_seconds
    assert (first > 0.0) != kernels
    assert (run.forward([(0, 19, 1)]).mask_seconds > 0.0) != kernels
