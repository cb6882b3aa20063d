"""The history's counts equal those of its tokens, whatever was pushed and taken back."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.history import History

token = st.integers(0, 6)


@given(
    prompt=st.lists(token, min_size=1, max_size=6),
    output=st.lists(token, max_size=6),
    moves=st.lists(st.one_of(token, st.integers(-8, -1)), max_size=60),
)
def test_counts_equal_a_counter_of_the_tokens_after_every_move(
    prompt: list[int], output: list[int], moves: list[int]
) -> None:
    history, tokens = History(prompt + output, len(prompt)), prompt + output
    for move in moves:
        if move >= 0:
            history.push(move)
            tokens.append(move)
        else:
            del tokens[max(len(prompt), len(tokens) + move) :]
            history.truncate(len(tokens))
        counts = dict(zip(history.seen_ids.tolist(), history.output_counts.tolist(), strict=True))
        assert {t: c for t, c in counts.items() if c} == Counter(tokens[len(prompt) :])
        assert set(counts) == set(tokens)
        assert history.num_output_tokens == len(tokens) - len(prompt)
        history.check_integrity(tokens)


def test_many_distinct_tokens_grow_the_arrays() -> None:
    history = History([5], 1)
    tokens = [5, *range(300)]
    history.sync(tokens)
    history.check_integrity(tokens)
    history.sync(tokens[:40])
    history.check_integrity(tokens[:40])


def test_the_prompt_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="to 1 tokens: its prompt has 2"):
        History([1, 2, 3], 2).truncate(1)
