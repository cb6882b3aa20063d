"""The context tree against a search through all texts, and the price of its operations."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specdec.drafters import context_tree
from specdec.drafters.context_tree import ContextTree

TOKENS = st.integers(0, 2)
DRAFTERS = str(Path(context_tree.__file__).parent)


def naive(text: list[int], inserted: list[int], query: list[int], max_depth: int, max_recent: int) -> tuple[int, Any]:
    """Longest suffix of ``query`` that stands before one of the ``inserted`` positions, and the latest of these."""
    for length in range(min(max_depth, len(query)), 0, -1):
        suffix = query[-length:]
        if suffix[0] < 0:
            continue
        found = [at for at in inserted if at >= length and text[at - length : at] == suffix]
        if found:
            return length, tuple(found[-max_recent:])
    return 0, ()


def count_lines(call: Callable[..., object], *arguments: Any) -> int:
    """Lines of the drafters that run during the call: its operations, whatever the machine's speed."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(DRAFTERS):
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call(*arguments)
    finally:
        sys.settrace(before)
    return lines


def grown(tokens: list[int], **sizes: int) -> ContextTree:
    tree = ContextTree(**sizes)
    tree.text += [-1, *tokens]
    for position in range(2, len(tree.text)):
        tree.insert(position)
    return tree


class TreeMachine(RuleBasedStateMachine):
    """Whatever came and went, a lookup finds what a search through the text finds."""

    @initialize(max_depth=st.integers(1, 6), max_recent=st.integers(2, 4))
    def build(self, max_depth: int, max_recent: int) -> None:
        self.sizes = (max_depth, max_recent)
        self.tree = ContextTree(max_depth=max_depth, max_recent=max_recent)
        self.inserted: deque[int] = deque()
        self.num_stretches = 0

    @rule(tokens=st.lists(TOKENS, min_size=1, max_size=12), context=st.integers(0, 3))
    def add_a_text(self, tokens: list[int], context: int) -> None:
        self.num_stretches += 1
        text = self.tree.text
        start = len(text)
        text += [-self.num_stretches - 1, *tokens]
        for position in range(min(start + 1 + context, len(text)), len(text)):
            self.tree.insert(position)
            self.inserted.append(position)

    @rule(count=st.integers(1, 12))
    def remove_the_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self.inserted))):
            self.tree.remove(self.inserted.popleft())

    @rule(query=st.lists(TOKENS, min_size=1, max_size=9))
    def find(self, query: list[int]) -> None:
        found = self.tree.find([-1, *query], len(query) + 1)
        assert found == naive(self.tree.text, list(self.inserted), query, *self.sizes)

    @rule()
    def find_the_end(self) -> None:
        text = self.tree.text
        if text:
            assert self.tree.find(text, len(text)) == naive(text, list(self.inserted), text, *self.sizes)

    @invariant()
    def counts_hold(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check_integrity()
            assert self.tree.num_occurrences == len(self.inserted)


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


@given(tokens=st.lists(TOKENS, min_size=2, max_size=40), max_depth=st.integers(1, 8))
def test_nothing_is_left_when_all_was_removed(tokens: list[int], max_depth: int) -> None:
    tree = grown(tokens, max_depth=max_depth)
    for position in range(2, len(tree.text)):
        tree.remove(position)
    tree.check_integrity()
    assert (tree.num_occurrences, tree.num_leaves, tree.num_nodes) == (0, 0, 0)
    assert tree.find(tree.text, len(tree.text)) == (0, ())


def streams(length: int) -> dict[str, list[int]]:
    rng = random.Random(length)
    return {
        "random": [rng.randrange(1000) for _ in range(length)],
        "two tokens": [rng.randrange(2) for _ in range(length)],
        "one token": [7] * length,
        "loop": [i % 20 for i in range(length)],
    }


@pytest.mark.parametrize("kind", list(streams(1)))
def test_a_walk_visits_at_most_one_node_for_each_token_of_depth(kind: str) -> None:
    """However large the tree: 8 times the text may not cost more than the depth allows."""
    depth = 16
    lines_a_node = 16
    for length in (500, 4000):
        tree = grown(streams(length)[kind], max_depth=depth)
        text = tree.text
        text.append(streams(length)[kind][0])
        bound = lines_a_node * (depth + 1)
        assert 0 < count_lines(tree.find, text, len(text)) <= bound
        assert 0 < count_lines(tree.insert, len(text) - 1) <= bound
        assert 0 < count_lines(tree.remove, 2) <= bound


def test_a_lookup_in_random_text_costs_the_same_in_a_store_of_any_size() -> None:
    def mean_lines(length: int) -> float:
        tree = grown(streams(length)["random"])
        rng = random.Random(1)
        queries = [[-1, *(rng.randrange(1000) for _ in range(8))] for _ in range(200)]
        return sum(count_lines(tree.find, query, len(query)) for query in queries) / len(queries)

    assert mean_lines(32_000) <= 2.5 * mean_lines(1000)


@pytest.mark.parametrize(("sizes"), [{"max_depth": 0}, {"max_recent": 1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"got .*{next(iter(sizes.values()))}"):
        ContextTree(**sizes)
