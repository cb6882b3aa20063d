"""The store of past outputs: bounded in bytes and salts, exact in what it finds, silent across salts."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.drafters.output_store import OutputStore

TOKENS = st.integers(0, 2)
SALTS = st.sampled_from([b"", b"a", b"b"])


@dataclass
class Unit:
    salt: bytes
    context: list[int]
    tokens: list[int]
    ahead: list[int]


def found_next(store: OutputStore, salt: bytes, query: list[int], reach: int) -> tuple[int, list[list[int]]]:
    """Length of the match, and what can be read after each of its places, the newest last."""
    length, occurrences, text = store.find(salt, [-1, *query], len(query) + 1)
    following = []
    for at in occurrences:
        end = next(i for i in range(at, len(text)) if text[i] < 0)
        following.append(text[at : min(end, at + reach)])
    return length, following


def naive_next(
    units: list[Unit], salt: bytes, query: list[int], reach: int, depth: int, recent: int
) -> tuple[int, list[list[int]]]:
    for length in range(min(depth, len(query)), 0, -1):
        following = []
        for unit in units:
            text = unit.context + unit.tokens + unit.ahead
            for at in range(len(unit.context), len(unit.context) + len(unit.tokens)):
                if unit.salt == salt and at >= length and text[at - length : at] == query[-length:]:
                    following.append(text[at : at + reach])
        if following:
            return length, following[-recent:]
    return 0, []


class StoreMachine(RuleBasedStateMachine):
    """Under any history the store finds what a search through its newest units finds, and keeps within its bounds."""

    DEPTH, RECENT, AHEAD = 4, 3, 2

    @initialize(max_bytes=st.sampled_from([4_000, 10_000, 10**9]), max_salts=st.integers(1, 3))
    def build(self, max_bytes: int, max_salts: int) -> None:
        self.store = OutputStore(
            max_bytes=max_bytes,
            max_salts=max_salts,
            unit_tokens=5,
            ahead_tokens=self.AHEAD,
            max_depth=self.DEPTH,
            max_recent=self.RECENT,
        )
        self.units: list[Unit] = []
        self.used: list[bytes] = []  # salts with units, the one used last at the end

    def use(self, salt: bytes) -> None:
        self.used = [other for other in self.used if other != salt] + [salt]

    @rule(
        salt=SALTS,
        context=st.lists(TOKENS, max_size=6),
        tokens=st.lists(TOKENS, min_size=1, max_size=5),
        ahead=st.lists(TOKENS, max_size=3),
    )
    def add(self, salt: bytes, context: list[int], tokens: list[int], ahead: list[int]) -> None:
        evicted = self.store.num_evicted
        self.store.add(salt, context, tokens, ahead)
        gone = self.store.num_evicted - evicted
        kept = self.store.num_units - 1
        assert gone == len(self.units) - kept
        # The oldest units of all go for room in bytes; then, for a new salt, all of the salt used longest ago.
        for dropped in range(gone + 1):
            left = self.units[dropped:]
            salts = [other for other in self.used if any(unit.salt == other for unit in left)]
            if salt not in salts and len(salts) == self.store.max_salts:
                left = [unit for unit in left if unit.salt != salts[0]]
            if len(left) == kept:
                break
        assert len(left) == kept
        self.units = left
        self.used = [other for other in self.used if any(unit.salt == other for unit in left)]
        self.units.append(Unit(salt, context[-self.DEPTH :], tokens, ahead[: self.AHEAD]))
        self.use(salt)

    @rule(salt=SALTS, query=st.lists(TOKENS, min_size=1, max_size=6))
    def find(self, salt: bytes, query: list[int]) -> None:
        found = found_next(self.store, salt, query, 6)
        if salt in self.used:
            self.use(salt)
        assert found == naive_next(self.units, salt, query, 6, self.DEPTH, self.RECENT)

    @invariant()
    def bounds_hold(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()
            assert self.store.memory_bytes <= self.store.max_bytes
            assert self.store.num_salts == len(self.used) <= self.store.max_salts
            assert self.store.num_units == len(self.units)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_what_was_said_under_one_salt_is_not_found_under_another() -> None:
    store = OutputStore()
    store.add(b"a", [1, 2], [3, 4, 5], [])
    assert found_next(store, b"a", [1, 2, 3], 2) == (3, [[4, 5]])
    for salt in (b"b", b"", b"a\0"):
        assert found_next(store, salt, [1, 2, 3], 2) == (0, [])


def test_looking_things_up_under_unknown_salts_takes_no_memory() -> None:
    store = OutputStore()
    for i in range(100):
        found_next(store, str(i).encode(), [1, 2], 2)
    assert (store.num_salts, store.memory_bytes) == (0, 0)


def test_a_new_salt_costs_the_one_used_longest_ago() -> None:
    store = OutputStore(max_salts=2)
    store.add(b"a", [], [1, 2, 3], [])
    store.add(b"b", [], [1, 2, 4], [])
    found_next(store, b"a", [1], 1)
    store.add(b"c", [], [1, 2, 5], [])
    assert [found_next(store, salt, [1, 2], 1) for salt in (b"a", b"b", b"c")] == [(2, [[3]]), (0, []), (2, [[5]])]
    store.check_integrity()


def test_many_small_salts_take_nobodys_outputs_while_there_are_bytes() -> None:
    store = OutputStore()
    store.add(b"idle", [1], [2, 3], [])
    for i in range(2000):
        store.add(f"one of many {i}".encode(), [], [1, 2], [])
    assert found_next(store, b"idle", [1, 2], 1) == (2, [[3]])
    assert store.num_evicted == 0
    store.check_integrity()


@pytest.mark.parametrize("num_tokens", [1, 32])
def test_the_estimate_counts_what_a_salt_of_one_small_output_costs(num_tokens: int) -> None:
    salts = [f"tenant {i}".encode() for i in range(300)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        store = OutputStore()
        for i, salt in enumerate(salts):
            context, tokens = ([int(str(start + i + j)) for j in range(32)] for start in (1000, 5000))
            store.add(salt, context, tokens[:num_tokens], [])
            del context, tokens
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * store.memory_bytes <= after - before <= 1.1 * store.memory_bytes


def test_the_oldest_outputs_leave_whole_and_take_their_counts_with_them() -> None:
    sizes = {"unit_tokens": 4, "ahead_tokens": 1, "max_depth": 3}
    room = 0
    while True:  # the least that holds two units
        store = OutputStore(max_bytes=room, **sizes)
        store.add(b"", [], [1, 2, 9, 9], [])
        store.add(b"", [], [1, 2, 8, 8], [])
        if store.num_units == 2:
            break
        room += 100
    assert found_next(store, b"", [1, 2], 2) == (2, [[9, 9], [8, 8]])
    store.add(b"", [], [1, 2, 7, 7], [])
    assert found_next(store, b"", [1, 2], 2) == (2, [[8, 8], [7, 7]])
    assert found_next(store, b"", [9], 1) == (0, [])
    assert store.num_evicted == 1


def test_nothing_of_an_output_that_left_is_read_after_one_that_took_its_place() -> None:
    store = OutputStore(max_bytes=6_000, unit_tokens=6, ahead_tokens=4, max_depth=3)
    for first in range(100, 160, 20):
        store.add(b"", [1, 2, 3], [first + i for i in range(6)], [10, 11, 12])
    for first in range(200, 400, 10):
        store.add(b"", [], [first, first + 1, first + 2], [])
        assert found_next(store, b"", [first], 9) == (1, [[first + 1, first + 2]])
    assert store.num_evicted > 3


def test_a_unit_that_can_never_fit_costs_nobody_their_place() -> None:
    store = OutputStore(max_bytes=3_000, unit_tokens=6, ahead_tokens=4, max_depth=3)
    store.add(b"", [], [1, 2], [])
    store.add(b"a", [], [1, 2, 3, 4, 5, 6], [])
    assert (store.num_units, store.num_evicted) == (1, 0)


@pytest.mark.parametrize("max_bytes", [0, 100])
def test_a_store_without_room_stays_empty(max_bytes: int) -> None:
    store = OutputStore(max_bytes=max_bytes)
    store.add(b"", [1], [2, 3], [4])
    assert (store.num_units, store.num_salts, store.memory_bytes) == (0, 0, 0)
    assert found_next(store, b"", [2], 1) == (0, [])


def test_a_unit_of_the_wrong_size_is_refused() -> None:
    store = OutputStore(unit_tokens=2)
    for tokens in ([], [1, 2, 3]):
        with pytest.raises(ValueError, match=f"1 to 2 tokens, got {len(tokens)}"):
            store.add(b"", [], tokens, [])


@pytest.mark.parametrize("sizes", [{"max_bytes": -1}, {"max_salts": 0}, {"unit_tokens": 0}, {"ahead_tokens": 0}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    (name, value), *_ = sizes.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        OutputStore(**sizes)


@pytest.mark.parametrize("vocab", [2, 300, 40_000])
def test_the_estimate_of_memory_is_what_the_allocator_says(vocab: int) -> None:
    rng = random.Random(0)
    outputs = [[rng.randrange(1000, 1000 + vocab) for _ in range(96)] for _ in range(60)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        store = OutputStore()
        for output in outputs:
            copy = [int(str(token)) for token in output]  # ints of its own, as a step's are
            for first in range(0, len(copy), 32):
                store.add(b"", copy[max(0, first - 32) : first], copy[first : first + 32], copy[first + 32 :])
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.75 <= store.memory_bytes / (after - before) <= 1.33
