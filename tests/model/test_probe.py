"""The exactness probe: the level is measured, and a batch-dependent executor is found out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import model.kernels
from kvcache.storage import KVStorage, PlaneSpec
from model.batch import PackedBatch
from model.generic import GenericExecutor
from model.interface import ForwardOutput, ModelInfo
from model.kernels.ops import ATTENTION_ROWS, MATMUL_ROWS, PANEL_ROWS, TILE_COLUMNS
from model.probe import probe_exactness
from model.probe_sizes import EVERY, row_counts
from tests.model.families import build_executor
from tests.model.packing import Packing

LARGE = torch.tensor(float("inf"))


class Disturbed:
    """An executor that is wrong in the last bit: logits and layer outputs of the rows that ``when(batch)`` names."""

    def __init__(self, inner: GenericExecutor, when: Callable[[PackedBatch], Tensor]) -> None:
        self._inner, self._when = inner, when
        self.info, self.kind, self.planes, self.bind = inner.info, inner.kind, inner.planes, inner.bind

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        out = self._inner.forward(batch, capture_layers=capture_layers)
        rows = torch.zeros(batch.num_rows, dtype=torch.bool) | self._when(batch)
        logits = torch.where(rows[batch.logits_rows, None], torch.nextafter(out.logits, LARGE), out.logits)
        layers = out.layers
        if layers is not None:
            layers = torch.where(rows[:, None], torch.nextafter(layers, LARGE.to(layers.dtype)), layers)
        return dataclasses.replace(out, logits=logits, layers=layers)


@pytest.fixture(scope="module")
def executor() -> GenericExecutor:
    return build_executor("llama", "bfloat16", max_position_embeddings=96)  # a short context keeps the probe short


@pytest.mark.parametrize(("dtype", "context"), [("bfloat16", 512), ("float32", 96)])
def test_a_row_invariant_executor_is_l0(dtype: str, context: int) -> None:
    report = probe_exactness(build_executor("qwen3", dtype, max_position_embeddings=context), budget=80)
    assert report.level == "L0"
    assert all(check.passed for check in report.checks)
    assert 16 in report.tile_classes


def rows_at(batch: PackedBatch, *places: int) -> Tensor:
    return torch.isin(torch.arange(batch.num_rows), torch.tensor(places))


def nothing(batch: PackedBatch) -> Tensor:
    return torch.tensor(False)


WRONG: dict[str, tuple[Callable[[PackedBatch], Tensor], str]] = {  # and how the reason begins to name it
    "a batch of one row": (lambda b: torch.tensor(b.num_rows == 1), "; 1 row: a row alone differs"),
    "some count of rows": (lambda b: torch.tensor(b.num_rows == 13), "; 13 rows: 13 of 13 rows differ"),
    "more rows than some size": (
        lambda b: torch.tensor(b.num_rows > 40),
        "; 41 rows with a prefill of 27: 15 of 15 rows differ from themselves alone",
    ),
    "the budget": (lambda b: torch.tensor(b.num_rows == 80), "; 80 rows with a prefill"),
    "one place": (lambda b: rows_at(b, 11) & torch.tensor(b.num_rows == 15), "; 15 rows: 1 of 15 rows differ from"),
    "one place of a tile": (lambda b: rows_at(b, 11), "the first is row 11 "),
    "a place far behind": (lambda b: rows_at(b, 61), "the first is row 61 "),
    "a prefill's rows": (
        lambda b: torch.tensor(b.num_rows > 20) & (b.positions == 21),
        "; 36 rows with a prefill of 22: 1 of 15 rows differ from themselves alone",
    ),
    "a chunk's first position": (
        lambda b: (b.positions == 64) & torch.tensor(b.num_rows > 1),
        "(position 64)",
    ),
    "chunks from an unaligned start": (
        lambda b: torch.tensor(b.num_sequences == 1 and b.num_rows > 5 and int(b.positions[0]) % 16 != 0),
        "; also: 16 rows from position 1 on",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_one_bit_that_is_wrong_in_one_class_of_batches_makes_it_l2_and_the_reason_names_it(
    executor: GenericExecutor, wrong: str
) -> None:
    when, named = WRONG[wrong]
    report = probe_exactness(Disturbed(executor, when), budget=80)
    assert report.level == "L2"
    assert named in report.detail
    assert " by up to " in report.detail


class Honest:
    """A row's outputs are a function of its token and position: row-invariant, and quick."""

    def __init__(self, info: ModelInfo, context: int) -> None:
        self.info = dataclasses.replace(info, max_model_len=context)
        self.kind, self.planes = "honest", (PlaneSpec("target.0.k", (1, 4), torch.float32),)

    def bind(self, storage: KVStorage) -> None:
        self._storage = storage

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        rows = torch.sin((batch.input_ids * 7 + batch.positions * 13)[:, None] * torch.arange(1.0, 5.0))
        self._storage.plane("target.0.k")[batch.slot_mapping] = rows[:, None]
        return ForwardOutput(rows[batch.logits_rows], rows[batch.logits_rows], rows[None] if capture_layers else None)


@pytest.mark.parametrize("count", [*range(1, 33), 33, 36, 37, 41, 64, 65, 77, 100, 129, 171, 240, 241, 257, 400])
def test_an_executor_that_is_wrong_at_one_number_of_rows_is_found(executor: GenericExecutor, count: int) -> None:
    honest = Honest(executor.info, 512)
    wrong = Disturbed(honest, lambda batch: torch.tensor(batch.num_rows == count))  # type: ignore[arg-type]
    report = probe_exactness(wrong, budget=400)
    assert report.level == "L2"
    rows = "1 row" if count == 1 else f"{count} rows"
    assert any(check.name.startswith(rows) and not check.passed for check in report.checks)


@pytest.mark.parametrize("context", [512, 40])  # with the shorter one a prefill has to make up the number
def test_every_small_number_of_rows_is_a_check_of_its_own(executor: GenericExecutor, context: int) -> None:
    report = probe_exactness(Honest(executor.info, context), budget=40)
    assert report.level == "L0"
    names = {" ".join(check.name.split()[:2]) for check in report.checks}
    assert {"1 row", *(f"{count} rows" for count in range(2, 34))} <= names


def test_the_numbers_of_rows_follow_the_tiles(executor: GenericExecutor) -> None:
    honest = Honest(executor.info, 512)
    counts = row_counts(honest, 4096)
    assert set(range(1, EVERY + 1)) < set(counts)
    assert {3 * MATMUL_ROWS, ATTENTION_ROWS, 2 * ATTENTION_ROWS, PANEL_ROWS, PANEL_ROWS + 1, 4096} <= set(counts)
    tiled = build_executor("llama", max_position_embeddings=16)
    before = row_counts(tiled, 4096)
    tiled.tile_classes = (16, 90)
    assert {45, 90, 91} <= set(row_counts(tiled, 4096)) - set(before)
    assert max(row_counts(tiled, 77)) == 77


def test_the_sizes_of_the_kernels_blocks_are_those_of_their_sources() -> None:
    sources = Path(model.kernels.__file__).parent / "csrc"
    text = "".join(file.read_text() for file in sources.glob("*.h"))
    sizes = dict(re.findall(r"constexpr \w+ (k\w+) = (\d+);", text))
    assert (int(sizes["kMaxRows"]), int(sizes["kPanelRows"])) == (MATMUL_ROWS, PANEL_ROWS)
    assert (int(sizes["kRowBlock"]), int(sizes["kTileColumns"])) == (ATTENTION_ROWS, TILE_COLUMNS)


def test_an_executor_that_is_disturbed_nowhere_is_l0(executor: GenericExecutor) -> None:
    assert probe_exactness(Disturbed(executor, nothing), budget=80).level == "L0"


def test_keys_that_a_batch_writes_otherwise_are_found_even_if_no_logits_show_it(executor: GenericExecutor) -> None:
    class WritesOtherwise(Disturbed):
        def bind(self, storage: KVStorage) -> None:
            self.storage = storage
            self._inner.bind(storage)

        def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
            out = super().forward(batch, capture_layers=capture_layers)
            if batch.num_rows > 40:
                last = batch.slot_mapping[-1]
                self.storage.plane("target.1.k")[last] *= 1.5
            return out

    disturbed = WritesOtherwise(executor, nothing)
    del disturbed.__dict__["bind"]
    report = probe_exactness(disturbed, budget=45)
    assert report.level == "L2"
    assert "wrote into the KV plane target.1.k differs" in report.detail


def test_nan_logits_are_not_l0(executor: GenericExecutor) -> None:
    class Broken(Disturbed):
        def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
            out = self._inner.forward(batch, capture_layers=capture_layers)
            return dataclasses.replace(out, logits=out.logits * float("nan"))

    assert probe_exactness(Broken(executor, nothing), budget=20).level == "L2"


def test_the_storage_of_the_caller_is_bound_again(executor: GenericExecutor) -> None:
    packing = Packing(executor, [5])
    before = packing.run((0, [1, 2, 3, 4, 5], 0)).logits
    probe_exactness(executor, packing.storage, budget=20)
    assert torch.equal(packing.run((0, [5], 4)).logits[0], before[4])


def test_another_tile_is_used_only_if_it_has_the_bits_of_the_base_tile() -> None:
    executor = build_executor("llama", "bfloat16", max_position_embeddings=64)
    assert probe_exactness(executor, budget=64).tile_classes == (4, 8, 16, 64)
    head = executor.structure.layers[-1]
    head.register_forward_hook(lambda m, args, out: out * (1.01 if out.shape[1] == 64 else 1.0))
    assert probe_exactness(executor, budget=64).tile_classes == (4, 8, 16)
    assert executor.tile_classes == (4, 8, 16)


def test_a_context_shorter_than_the_probe_is_enough() -> None:
    assert probe_exactness(build_executor("llama", max_position_embeddings=4), budget=512).level == "L0"


def test_a_storage_is_never_written_outside_of_the_probe(executor: GenericExecutor) -> None:
    storage = KVStorage(executor.planes, num_blocks=4, block_size=16)
    probe_exactness(executor, storage, budget=20)
    assert all(not storage.plane(name).any() for name in storage.names)
