"""Which tokens of a prediction count as accepted, and who is told of the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.audit import AuditConfig
from scheduler.prediction import PredictionIndex, PredictionTally
from tests.scheduler.builders import Bench, build_request, config, expected

PROMPT_END = 1
TOKENS = st.lists(st.integers(2, 5), min_size=1, max_size=12)


def count(prediction: Sequence[int], *steps: tuple[Sequence[int], int]) -> int:
    tally = PredictionTally(PredictionIndex(PROMPT_END, prediction))
    for token_ids, num_drafts in steps:
        tally.take(token_ids, num_drafts)
    return tally.num_accepted


@pytest.mark.parametrize(
    ("prediction", "steps", "accepted"),
    [
        ((10, 11, 12), [((10, 11, 12, 13), 3)], 3),  # all of it, from the first token on
        ((10, 11, 12), [((10,), 0), ((11, 12), 1)], 1),  # only what was an accepted draft
        ((10, 11, 12), [((10,), 0), ((11,), 0), ((12,), 0)], 0),  # it came, but the target was not helped
        ((10, 11, 12, 13, 14), [((10, 11, 20), 2), ((13,), 0), ((14,), 1)], 3),  # taken up behind a deviation
        ((10, 11, 12, 13, 14), [((10, 11, 20), 2), ((21, 12), 1)], 2),  # 12 does not stand behind 21
        ((10, 11), [((20, 11), 2)], 0),
        ((10, 11), [((11,), 1)], 0),  # nor does 11 begin it
        ((10, 11, 12), [((10, 11, 12), 3), ((10,), 0), ((11, 12), 2)], 3),  # each place once
        ((10, 11, 30, 10, 11), [((10, 11), 2), ((20,), 0), ((10,), 0), ((11,), 1)], 3),  # two places, both came
        ((20, 21, 10, 11), [((10,), 0), ((11,), 1), ((20,), 0), ((21,), 1)], 2),  # in another order
        ((10, 10, 10), [((10, 10, 10, 10), 4)], 3),
    ],
)
def test_an_accepted_draft_counts_where_it_stands_behind_the_same_token(
    prediction: tuple[int, ...], steps: list[tuple[tuple[int, ...], int]], accepted: int
) -> None:
    assert count(prediction, *steps) == accepted


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(0, 12)), max_size=8))
def test_no_more_counts_than_was_predicted_or_drafted(
    prediction: list[int], steps: list[tuple[list[int], int]]
) -> None:
    accepted = count(prediction, *steps)
    assert 0 <= accepted <= min(len(prediction), sum(min(drafts, len(ids)) for ids, drafts in steps))


@given(TOKENS)
def test_an_output_that_was_foreseen_counts_whole(prediction: list[int]) -> None:
    assert count(prediction, (prediction, len(prediction))) == len(prediction)


def test_an_empty_prediction_has_no_places() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PredictionIndex(PROMPT_END, ())


def test_every_choice_is_told_of_the_prediction_and_counts_for_itself() -> None:
    request = build_request(n=2, max_tokens=12)
    right = tuple(expected(request, 0)[0])
    request = replace(request, prediction_token_ids=right)
    bench = Bench(accept=1.0, config=config(num_speculative_tokens=4))
    bench.add(request)
    plans = [bench.run_step()]
    assert all(item.sequence.prediction_token_ids == right for plan in plans if plan for item in plan.items)
    bench.drain()
    bench.check_output("r")
    timings = [bench.finish("r", index).timing for index in (0, 1)]
    assert all(timing is not None for timing in timings)
    foreseen, other = (timing.num_accepted_prediction for timing in timings if timing is not None)
    first = timings[0]
    assert first is not None
    assert foreseen == first.num_accepted > 0  # every accepted draft was foreseen
    assert other < foreseen


def test_a_stop_string_cuts_what_counts() -> None:
    plain = build_request(max_tokens=20)
    tokens = expected(plain, 0)[0]
    stop = "".join(chr(ord("a") + token % 26) for token in tokens[3:5])
    request = replace(build_request(max_tokens=20, stop=(stop,)), prediction_token_ids=tuple(tokens))
    bench = Bench(accept=1.0, config=config(num_speculative_tokens=9))
    bench.add(request)
    bench.drain()
    timing = bench.finish("r").timing
    assert timing is not None
    assert timing.num_accepted_prediction == timing.num_accepted < timing.num_output_tokens


def test_an_audit_runs_without_the_prediction() -> None:
    bench = Bench(
        config=config(audit=AuditConfig(rate=1.0, share=1.0)),  # type: ignore[arg-type]
        num_private_blocks=16,
    )
    bench.add(replace(build_request(max_tokens=6), prediction_token_ids=(7, 8, 9)))
    audited = 0
    while bench.scheduler.has_work:
        plan = bench.run_step()
        for item in plan.items if plan else ():
            if item.sequence.table.private:
                audited += 1
                assert item.sequence.prediction_token_ids == ()
    assert audited
    status = bench.scheduler.audit_status
    assert status is not None
    assert status.results["match"] == 1
