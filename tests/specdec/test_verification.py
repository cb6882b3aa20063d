"""Pure verification."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.verification import verify
from tests.specdec.verification_cases import CASES, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verdict(case: Case) -> None:
    verdict = verify(case.drafts, case.target.__getitem__, stop_token_ids=case.stops, tokens_left=case.tokens_left)
    assert verdict.token_ids == case.emitted
    assert verdict.num_accepted == case.accepted
    assert verdict.finish_reason == case.finish_reason
    assert verdict.stop_token_id == case.stop_token_id


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_row_is_sampled_beyond_the_last_emitted_token(case: Case) -> None:
    asked: list[int] = []

    def target(row: int) -> int:
        asked.append(row)
        return case.target[row]

    verify(case.drafts, target, stop_token_ids=case.stops, tokens_left=case.tokens_left)
    assert asked == list(range(len(case.emitted)))


ids = st.integers(0, 3)


@given(target=st.lists(ids, min_size=12, max_size=12), drafts=st.lists(ids, max_size=8), left=st.integers(1, 10))
def test_drafts_never_change_what_is_emitted(target: list[int], drafts: list[int], left: int) -> None:
    verdict = verify(drafts, target.__getitem__, stop_token_ids={3}, tokens_left=left)
    plain: list[int] = []
    for token in target[: len(verdict.token_ids)]:
        step = verify([], lambda _, token=token: token, stop_token_ids={3}, tokens_left=left - len(plain))  # type: ignore[misc]
        plain.extend(step.token_ids)
        if step.finish_reason:
            break
    assert verdict.token_ids == tuple(plain)
    assert verdict.finish_reason == step.finish_reason
    assert verdict.num_accepted <= len(verdict.token_ids) <= verdict.num_accepted + 1
