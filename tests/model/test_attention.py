"""Paged attention on torch: what it computes, and what can never matter to it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from model.attention import CHUNK, AttentionTile, TileSequence, paged_attention

HEADS, KV_HEADS, DIM, VALUE_DIM, ROWS = 4, 2, 16, 12, 16


@dataclass
class Context:
    """One sequence's keys and values by position, and queries for its newest rows."""

    queries: Tensor  # [count, H, D]: of positions length - count ..
    keys: Tensor  # [length, H_kv, D]
    values: Tensor  # [length, H_kv, D_v]

    @property
    def start(self) -> int:
        return len(self.keys) - len(self.queries)

    def newest(self, first: int, count: int) -> Context:
        """As if ``queries[first : first + count]`` were the newest rows."""
        length = self.start + first + count
        return Context(self.queries[first : first + count], self.keys[:length], self.values[:length])


def build_context(length: int, count: int, seed: int = 0) -> Context:
    generator = torch.Generator().manual_seed(seed + 1000 * length)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Context(draw(count, HEADS, DIM) * 2, draw(length, KV_HEADS, DIM), draw(length, KV_HEADS, VALUE_DIM))


def attend(
    contexts: list[Context],
    *,
    first: int = 0,
    block_size: int = 16,
    shuffle: int = 0,
    poison: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    classes: tuple[int, ...] = (),
) -> list[Tensor]:
    """Outputs of each context's queries, packed into one tile of ROWS rows that begins with ``first`` dummies."""
    counts = [-(-len(c.keys) // block_size) + 1 for c in contexts]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(shuffle))
    fill = float("nan") if poison else 0.0
    key_plane = torch.full((len(order) * block_size, KV_HEADS, DIM), fill)
    value_plane = torch.full((len(order) * block_size, KV_HEADS, VALUE_DIM), fill)
    query = torch.full((ROWS, HEADS, DIM), fill)
    sequences = []
    for context, blocks in zip(contexts, order.split([*counts, 2])[:-1], strict=True):
        positions = torch.arange(len(context.keys))
        slots = blocks[positions // block_size] * block_size + positions % block_size
        key_plane[slots], value_plane[slots] = context.keys, context.values
        count = len(context.queries)
        query[first : first + count] = context.queries
        sequences.append(TileSequence(first, count, context.start, blocks))
        first += count
    tile = AttentionTile(ROWS, sequences, block_size, torch.device("cpu"), classes)
    out = paged_attention(query, key_plane, value_plane, tile, scaling=0.3, window=window, softcap=softcap, sinks=sinks)
    return [out[s.first : s.first + s.count] for s in sequences]


def naive(context: Context, *, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax over the whole context at once, in float64."""
    group = HEADS // KV_HEADS
    keys = context.keys.double().repeat_interleave(group, dim=1)
    values = context.values.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", context.queries.double(), keys) * 0.3
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    rows = torch.arange(context.start, len(keys))[:, None]
    lanes = torch.arange(len(keys))[None]
    seen = lanes <= rows
    if window is not None:
        seen &= lanes > rows - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).float()


MIXED = [build_context(3, 3), build_context(CHUNK + 2, 5), build_context(1, 1), build_context(2 * CHUNK + 40, 4)]
VARIANTS = [
    {},
    {"window": 7},
    {"window": CHUNK + 9},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    {"window": 5, "softcap": 3.0, "sinks": torch.tensor([2.0, -1.0, 0.0, 1.0])},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "plain")
def test_equals_softmax_over_the_whole_context(variant: dict) -> None:
    expected = [naive(c, **{"window": None, "softcap": None, "sinks": None, **variant}) for c in MIXED]
    for got, want in zip(attend(MIXED, **variant), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "plain")
def test_a_row_has_the_bits_of_itself_alone_at_every_place_in_the_tile(variant: dict) -> None:
    packed = attend(MIXED, **variant)
    for i, context in enumerate(MIXED):
        for row in range(len(context.queries)):
            for place in (0, 1, 7, ROWS - 1):
                (alone,) = attend([context.newest(row, 1)], first=place, **variant)
                assert torch.equal(alone[0], packed[i][row])


@pytest.mark.parametrize("block_size", [1, 4, 64])
@pytest.mark.parametrize("window", [None, 7])
def test_block_size_and_physical_order_change_no_bit(block_size: int, window: int | None) -> None:
    expected = attend(MIXED, window=window)
    for shuffle in (1, 2):
        got = attend(MIXED, window=window, block_size=block_size, shuffle=shuffle)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "+".join(v) or "plain")
def test_nan_in_slots_and_rows_that_nobody_owns_changes_no_bit(variant: dict) -> None:
    expected = attend(MIXED, **variant)
    for block_size in (1, 16):
        got = attend(MIXED, poison=True, block_size=block_size, **variant)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nan_in_another_sequence_stays_there() -> None:
    expected = attend(MIXED)
    broken = dataclasses.replace(MIXED[1], values=torch.full_like(MIXED[1].values, float("nan")))
    got = attend([MIXED[0], broken, *MIXED[2:]])
    assert got[1].isnan().all()
    assert all(torch.equal(got[i], expected[i]) for i in (0, 2, 3))


def test_a_chunk_that_a_row_lacks_is_an_exact_no_op() -> None:
    # Rows on both sides of a chunk border: the first ones must not notice that the tile goes on to another chunk.
    context = build_context(CHUNK + 3, 6)
    (together,) = attend([context])
    (before,) = attend([context.newest(0, 3)])
    assert torch.equal(together[:3], before)


def test_rows_of_no_sequence_are_zero() -> None:
    tile = AttentionTile(ROWS, [], 16, torch.device("cpu"))
    out = paged_attention(
        torch.full((ROWS, HEADS, DIM), float("nan")),
        torch.full((16, KV_HEADS, DIM), float("nan")),
        torch.full((16, KV_HEADS, VALUE_DIM), float("nan")),
        tile,
        scaling=1.0,
    )
    assert torch.equal(out, torch.zeros(ROWS, HEADS, VALUE_DIM))


def test_what_the_masks_took_is_counted_once_for_all_layers() -> None:
    blocks = torch.arange(4)
    tile = AttentionTile(ROWS, [TileSequence(0, 2, 9, blocks)], 16, torch.device("cpu"))
    assert tile.mask_seconds == 0.0
    tile.parts(None)
    first = tile.mask_seconds
    assert first > 0.0
    tile.parts(None)
    assert tile.mask_seconds == first
    tile.parts(7)
    assert tile.mask_seconds > first


def test_a_sequences_rows_are_computed_among_the_fewest_rows_that_hold_them() -> None:
    blocks = torch.arange(4)
    sequences = [TileSequence(0, 3, 9, blocks), TileSequence(3, 5, 0, blocks), TileSequence(8, 1, 20, blocks)]
    sequences.append(TileSequence(15, 1, 7, blocks))
    tile = AttentionTile(ROWS, sequences, 16, torch.device("cpu"), (4, 8, ROWS))
    assert [(part.first, part.size, part.own) for part in tile.parts(None)] == [
        (0, 4, slice(0, 3)),
        (3, 8, slice(0, 5)),
        (8, 4, slice(0, 1)),
        (12, 4, slice(3, 4)),
    ]
    (whole,) = AttentionTile(ROWS, sequences[:1], 16, torch.device("cpu"), (2,)).parts(None)
    assert (whole.first, whole.size) == (0, ROWS)


@pytest.mark.parametrize("window", [None, 5])
def test_the_rows_beside_a_sequences_own_change_nothing(window: int | None) -> None:
    contexts = [build_context(CHUNK + 3, 3), build_context(40, 5, seed=1), build_context(2, 1, seed=2)]
    few = attend(contexts, window=window, classes=(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(few, attend(contexts, window=window), strict=True))
    alone = [attend([context], window=window, classes=(4, 8))[0] for context in contexts]
    assert all(torch.equal(a, b) for a, b in zip(few, alone, strict=True))
