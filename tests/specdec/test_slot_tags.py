"""Content tags: a slot is valid for a prefix if it was computed for exactly that prefix."""

from __future__ import annotations

import random
from array import array

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.slot_tags import SlotTags, next_tag, root_tag

BLOCK = 4
TOKENS = st.lists(st.integers(0, 3), max_size=70)


def tags_of(tokens: list[int], salt: bytes = b"") -> array[int]:
    tag, tags = root_tag(salt), array("Q")
    for token in tokens:
        tag = next_tag(tag, token)
        tags.append(tag)
    return tags


def slots_of(blocks: list[int], positions: range) -> np.ndarray:
    return np.array([blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions], dtype=np.int64)


@given(TOKENS, TOKENS)
def test_tags_are_equal_exactly_where_the_prefixes_are(first: list[int], second: list[int]) -> None:
    for p, (a, b) in enumerate(zip(tags_of(first), tags_of(second), strict=False)):
        assert (a == b) == (first[: p + 1] == second[: p + 1]), p


def test_a_tag_tells_positions_and_salts_apart() -> None:
    repeated = tags_of([7] * 5000)
    assert len(set(repeated)) == 5000
    assert 0 not in repeated
    assert not set(repeated) & set(tags_of([7] * 5000, b"tenant"))


@given(TOKENS, TOKENS, st.integers(0, 2**32), st.data())
def test_the_valid_prefix_is_the_longest_whose_tags_agree(
    written: list[int], wanted: list[int], seed: int, data: st.DataObject
) -> None:
    blocks = random.Random(seed).sample(range(30), 18)
    slots = SlotTags(30 * BLOCK, BLOCK)
    slots.set(slots_of(blocks, range(len(written))), tags_of(written))
    cleared = data.draw(st.sets(st.integers(0, max(0, len(written) - 1)), max_size=2)) if written else set()
    for p in cleared:
        slots.clear(slots_of(blocks, range(p, p + 1)))
    start = data.draw(st.integers(0, len(wanted)))
    end = data.draw(st.integers(start, len(wanted)))
    expected = start
    while expected < end and written[: expected + 1] == wanted[: expected + 1] and expected not in cleared:
        expected += 1
    assert slots.valid_until(blocks, tags_of(wanted), start, end) == expected


def test_what_a_slot_holds_is_known_until_it_is_cleared() -> None:
    slots = SlotTags(8, BLOCK)
    assert not slots.known.any()
    slots.set(slots_of([1], range(3)), tags_of([1, 2, 3]))
    slots.clear(np.array([5]))
    assert slots.known.tolist() == [False] * 4 + [True, False, True, False]
