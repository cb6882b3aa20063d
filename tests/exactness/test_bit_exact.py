"""Level L0: ids and logprobs of a request are identical, bit for bit, under every condition of the table."""

from __future__ import annotations

import pytest

from tests.exactness.builders import Subject, run_condition
from tests.exactness.conditions import CONDITIONS, REFERENCE, Condition


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
@pytest.mark.case("V 41758", "T 2208", "T 11300", "V 34497", "V 28558", "tenstorrent 415")
def test_an_answer_does_not_change(subject: Subject, condition: Condition) -> None:
    expected = subject.reference(REFERENCE, condition.max_output)
    assert run_condition(subject, condition) == expected


def test_the_requests_differ_from_each_other(subject: Subject) -> None:
    """The comparison has teeth: answers are not all alike, and sampling does not collapse to greedy."""
    completions = subject.reference(REFERENCE, None)
    assert len({completion.token_ids for completion in completions}) > len(completions) // 2


def test_drafts_are_accepted_and_rejected(subject: Subject) -> None:
    """The table exercises speculation: some drafts are accepted, some rejected."""
    engine_steps = subject.speculation_counts()
    assert engine_steps.num_drafted > engine_steps.num_accepted > 0
    assert engine_steps.rollback_tokens > 0
