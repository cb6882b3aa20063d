"""The generic executor: row invariance, layer by layer, and equality to Hugging Face's own forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.storage import KVStorage, PlaneSpec
from model.attention import CHUNK
from model.generic import BASE_TILE, GenericExecutor, plan_tiles
from tests.model.families import VOCAB, build_executor
from tests.model.packing import Packing, decode_alone, random_ids

# plain, sliding windows with softcap, another architecture with biases and learnt positions
SUBJECTS = [("llama", "bfloat16"), ("llama", "float32"), ("gemma2", "bfloat16"), ("gpt2", "float32")]
LONG = random_ids(CHUNK + 30, seed=1)
SHORT = random_ids(21, seed=2)
ROWS = [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 3, CHUNK + 29]


@pytest.fixture(scope="module", params=SUBJECTS, ids="-".join)
def executor(request: pytest.FixtureRequest) -> GenericExecutor:
    family, dtype = request.param
    return build_executor(family, dtype)


@pytest.fixture(scope="module")
def alone(executor: GenericExecutor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return decode_alone(executor, LONG, ROWS)


def assert_rows_equal(out, alone, offset: int = 0) -> None:
    logits, layers = alone
    for i, row in enumerate(ROWS):
        assert torch.equal(out.layers[:, offset + row], layers[i]), f"a layer of row {row} differs"
        assert torch.equal(out.logits[offset + row], logits[i]), f"the logits of row {row} differ"


@pytest.mark.parametrize("tiles", [(16,), (16, 64), (4, 8, 16)], ids=str)
def test_a_packed_row_equals_its_one_row_decode_layer_by_layer(executor, alone, tiles) -> None:
    packing = Packing(executor, [len(LONG), len(SHORT)], shuffle=3)
    executor.tile_classes = tiles
    try:
        out = packing.run((1, SHORT, 0), (0, LONG, 0), capture=True)
    finally:
        executor.tile_classes = (BASE_TILE,)
    assert_rows_equal(out, alone, offset=len(SHORT))


def test_verify_rows_beside_other_sequences_equal_one_row_decodes(executor, alone) -> None:
    logits, layers = alone
    packing = Packing(executor, [len(LONG), len(SHORT), 40])
    packing.run((0, LONG[:CHUNK], 0), (1, SHORT[:4], 0))
    third = random_ids(9, seed=5)
    out = packing.run((1, SHORT[4:9], 4), (0, LONG[CHUNK : CHUNK + 8], CHUNK), (2, third, 0), capture=True)
    for row in (CHUNK, CHUNK + 3):
        assert torch.equal(out.layers[:, 5 + row - CHUNK], layers[ROWS.index(row)])
        assert torch.equal(out.logits[5 + row - CHUNK], logits[ROWS.index(row)])


@pytest.mark.parametrize("pieces", [(1, 2, 3, 30), (16, 16), (50, 7, 100)], ids=str)
def test_pieces_of_a_prefill_change_no_bit(executor, alone, pieces) -> None:
    packing = Packing(executor, [len(LONG)])
    outs, start = [], 0
    for length in (*pieces, len(LONG)):
        if start < len(LONG):
            outs.append(packing.run((0, LONG[start : start + length], start)).logits)
            start += length
    got = torch.cat(outs)
    assert all(torch.equal(got[row], alone[0][i]) for i, row in enumerate(ROWS))


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_block_size_shuffled_blocks_and_nan_elsewhere_change_no_bit(executor, alone, block_size: int) -> None:
    packing = Packing(executor, [len(LONG), 30], block_size=block_size, shuffle=block_size, poison=True)
    assert_rows_equal(packing.run((0, LONG, 0), (1, SHORT, 0), capture=True), alone)


def test_nan_in_rejected_slots_of_the_own_sequence_changes_no_bit(executor, alone) -> None:
    packing = Packing(executor, [len(LONG)], block_size=4)
    packing.run((0, LONG[:CHUNK], 0))
    packing.run((0, random_ids(9, seed=9), CHUNK))  # a draft that is rejected altogether
    table, slots = packing.tables[0], range(CHUNK, CHUNK + 9)
    for name in packing.storage.names:
        packing.storage.plane(name)[[table[p // 4] * 4 + p % 4 for p in slots]] = float("nan")
    out = packing.run((0, LONG[CHUNK : CHUNK + 4], CHUNK), capture=True)
    for row in (CHUNK, CHUNK + 3):
        assert torch.equal(out.logits[row - CHUNK], alone[0][ROWS.index(row)])


def test_one_and_two_threads_give_the_same_bits(executor, alone) -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert_rows_equal(Packing(executor, [len(LONG)]).run((0, LONG, 0), capture=True), alone)


def test_equals_the_models_own_eager_forward(executor) -> None:
    got = Packing(executor, [len(LONG)]).run((0, LONG, 0)).logits
    model = executor.model
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([LONG]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation("truedraft_paged")
    error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
    if executor.info.dtype == "float32":
        assert error.max() < 1e-5
    else:
        assert error.median() < 0.03


def test_logits_and_hidden_rows_come_only_for_the_wanted_rows(executor) -> None:
    every = Packing(executor, [len(LONG)]).run((0, LONG, 0))
    some = Packing(executor, [len(LONG)]).run((0, LONG, 0), logits_from=20)
    none = Packing(executor, [len(LONG)]).run((0, LONG, 0), logits_from=len(LONG))
    assert every.hidden is not None
    assert some.hidden is not None
    assert torch.equal(some.logits, every.logits[20:])
    assert torch.equal(some.hidden, every.hidden[20:])
    assert some.layers is None
    assert none.logits.shape == (0, VOCAB)
    assert every.logits.dtype == torch.float32
    assert every.logits.device.type == "cpu"


def test_logits_are_not_rounded_to_the_models_dtype() -> None:
    out = Packing(build_executor("llama", "bfloat16"), [21]).run((0, SHORT, 0))
    assert not torch.equal(out.logits, out.logits.bfloat16().float())


def test_a_storage_of_other_planes_is_refused(executor) -> None:
    planes = [PlaneSpec(p.name, (*p.shape[:-1], 3), p.dtype) for p in executor.planes]
    with pytest.raises(ValueError, match=r"target\.0\.k"):
        executor.bind(KVStorage(planes, num_blocks=1, block_size=4))


@given(st.integers(1, 900), st.sampled_from([(16,), (16, 64), (4, 8, 16, 64, 256)]))
def test_tiles_cover_every_row_once_in_order(num_rows: int, classes: tuple[int, ...]) -> None:
    tiles = list(plan_tiles(num_rows, classes))
    covered = [row for first, count, _ in tiles for row in range(first, first + count)]
    assert covered == list(range(num_rows))
    assert all(0 < count <= size and size in classes for _, count, size in tiles)
    assert sum(size for _, _, size in tiles) <= max(BASE_TILE, 2 * num_rows)
    assert num_rows > BASE_TILE or len(tiles) == 1
