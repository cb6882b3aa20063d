"""Models with int8 weights: near the model that they came from, L0 against themselves, and never by accident."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.tiny_models import save_tiny_model
from model.errors import ModelError
from model.fused import FusedExecutor
from model.kernels import INSTRUCTION_SET, KernelsChoice, missing_instructions
from model.loader import LoadedModel, load_model
from tests.model.checkpoints import write_folder
from tests.model.kernel_builders import DTYPES, TINY_CONFIGS, PagedRun, fused_executor, tiny_model, token_ids
from tests.model.test_fused import Rows, assert_rows_equal_one_row_decodes

PATHS = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@PATHS
@pytest.mark.parametrize("name", list(TINY_CONFIGS))
def test_logits_are_near_those_of_the_unquantised_model(name: str, kernels: bool) -> None:
    rows: Rows = [(0, 0, 40)]
    network, sequences = tiny_model(name), token_ids([40], 131)
    plain = PagedRun(fused_executor(network, kernels=kernels), sequences, block_size=4).forward(rows).logits
    int8 = fused_executor(network, kernels=kernels, quantize="int8")
    found = PagedRun(int8, sequences, block_size=4).forward(rows).logits
    difference = (found - plain).norm(dim=-1) / plain.norm(dim=-1)
    assert 1e-4 < float(difference.median()) < 0.06


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["llama", "llama-biased-llama3-rope", "qwen3"])
@PATHS
def test_verify_rows_are_bit_equal_to_one_row_decodes_layer_by_layer(
    name: str, dtype: torch.dtype, kernels: bool
) -> None:
    executor = fused_executor(tiny_model(name, dtype), kernels=kernels, quantize="int8")
    mixed: list[Rows] = [[(1, 0, 1), (0, 0, 20), (2, 0, 2)], [(0, 20, 9), (1, 1, 7), (2, 2, 1)]]
    assert_rows_equal_one_row_decodes(executor, [29, 8, 3], [mixed], (1, 16))


def test_thread_count_changes_no_bit() -> None:
    network, sequences = tiny_model("llama", torch.bfloat16), token_ids([130, 40], 131)
    outputs = []
    for threads in (1, 2, 3):
        executor = fused_executor(network, kernels=True, num_threads=threads, quantize="int8")
        run = PagedRun(executor, sequences, block_size=16)
        run.forward([(0, 0, 128)])
        outputs.append(run.forward([(0, 128, 2), (1, 0, 40)]).logits)
    assert all(torch.equal(other, outputs[0]) for other in outputs[1:])


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "checkpoint")


def load(folder: Path, **changes: Any) -> LoadedModel:
    options: dict[str, Any] = {"max_batched_tokens": 20, "home": folder.parent / "home", "quantize": "int8"}
    return load_model(folder, **(options | changes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_quantised_model_reaches_l0_and_says_what_it_is(folder: Path, dtype: str, kernels: KernelsChoice) -> None:
    loaded = load(folder, dtype=dtype, kernels=kernels)
    compiled = kernels == "auto" and not missing_instructions()
    assert loaded.executor.kind == ("fused/" + (f"cpu-{INSTRUCTION_SET}" if compiled else "torch") + "-int8")
    assert (loaded.info.quantization, loaded.info.dtype) == ("int8", dtype)
    assert loaded.exactness.level == "L0", loaded.exactness.detail


def test_a_quantised_model_is_another_one_for_fingerprint_and_caches(folder: Path) -> None:
    plain, quantised, again = load(folder, quantize="none"), load(folder), load(folder)
    assert plain.info.quantization == "none"
    assert plain.fingerprint != quantised.fingerprint == again.fingerprint
    assert not quantised.exactness.cached
    assert again.exactness.cached
    assert again.exactness == quantised.exactness


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"executor": "generic"}, "executor is generic"), ({"quantize": "int4"}, "quantize must be none or int8")],
)
def test_what_cannot_be_quantised_is_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load(folder, **changes)


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_a_family_that_the_fused_executor_does_not_take_is_refused_and_not_served_otherwise(
    tmp_path: Path, family: str
) -> None:
    folder = save_tiny_model(family, tmp_path / "checkpoint", tokenizer=False)
    with pytest.raises(ModelError, match=f"quantize int8, .*model type '{family}'"):
        load(folder)


def test_weights_that_are_not_finite_are_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="down_proj of layer 1 holds values that are not finite"):
        load(folder)


@pytest.mark.parametrize("broken", ["none", "int8"])
def test_an_executor_that_computes_something_else_is_refused_in_either_precision(
    folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    whole = FusedExecutor.from_hf

    def from_hf(source: Any, *args: Any, **options: Any) -> FusedExecutor:
        if options["quantize"] == broken:
            source = {**source, "model.norm.weight": source["model.norm.weight"].flip(0) * torch.randn(64)}
        return whole(source, *args, **options)

    monkeypatch.setattr(FusedExecutor, "from_hf", from_hf)
    with pytest.raises(ModelError, match=r"quantize int8.*differs from the generic one"):
        load(folder)
