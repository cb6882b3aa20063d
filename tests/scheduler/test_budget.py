"""Sharing out the rows of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.budget import draft_allowance, share_drafts


@pytest.mark.parametrize(
    ("wants", "allowance", "grants"),
    [
        ([], 5, []),
        ([4, 1, 4], 7, [3, 1, 3]),
        ([4, 4, 4], 4, [2, 1, 1]),
        ([4, 4], 100, [4, 4]),
        ([0, 3], 2, [0, 2]),
        ([2, 2], 0, [0, 0]),
    ],
)
def test_shares(wants: list[int], allowance: int, grants: list[int]) -> None:
    assert share_drafts(wants, allowance) == grants


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 60))
def test_nothing_is_wasted_and_nobody_gets_more_than_asked(wants: list[int], allowance: int) -> None:
    grants = share_drafts(wants, allowance)
    assert all(0 <= grant <= want for grant, want in zip(grants, wants, strict=True))
    assert sum(grants) == min(allowance, sum(wants))


@given(st.integers(1, 600), st.integers(1, 600))
def test_a_pending_prompt_always_gets_a_row(rows_left: int, pending: int) -> None:
    assert rows_left - draft_allowance(rows_left, pending) >= 1


@given(st.integers(0, 600))
def test_without_prompts_drafts_get_every_row(rows_left: int) -> None:
    assert draft_allowance(rows_left, 0) == rows_left
