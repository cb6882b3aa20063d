"""The processed distribution equals one computed from first principles; every parameter is honoured or refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import InvalidLogits, NoTokenLeft, SamplingError
from specdec.history import History
from specdec.params import SamplingParams
from specdec.pipeline import SamplingRules, adjusted_logits, candidates
from tests.specdec.laws import naive_law

VOCAB = 12
BASE = SamplingParams(seed=1)


def law(row: np.ndarray, params: SamplingParams, tokens: list[int], num_prompt_tokens: int) -> list[float]:
    scores = adjusted_logits(row, SamplingRules(params, len(row)), History(tokens, num_prompt_tokens))
    kept = candidates(scores, params)
    dense = np.zeros(len(row))
    dense[kept.token_ids] = kept.probabilities()
    return dense.tolist()


def random_row(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 2).astype(np.float32)


token = st.integers(0, VOCAB - 1)
parameters = st.builds(
    SamplingParams,
    seed=st.just(1),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    logit_bias=st.dictionaries(token, st.sampled_from([-100.0, -1.0, 3.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.sampled_from([0, 2, 5]),
    stop_token_ids=st.frozensets(token, max_size=2),
    allowed_token_ids=st.none() | st.lists(token, min_size=6, max_size=9, unique=True).map(tuple),
    bad_words=st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)


@settings(max_examples=300, deadline=None)
@given(params=parameters, seed=st.integers(0, 10**6), tokens=st.lists(token, min_size=1, max_size=8), data=st.data())
def test_the_law_equals_the_naive_one(
    params: SamplingParams, seed: int, tokens: list[int], data: st.DataObject
) -> None:
    num_prompt_tokens = data.draw(st.integers(1, len(tokens)))
    row = random_row(seed)
    try:
        expected = naive_law(row.tolist(), params, tokens, num_prompt_tokens)
    except ValueError:  # max of nothing
        with pytest.raises(NoTokenLeft):
            law(row, params, tokens, num_prompt_tokens)
        return
    assert law(row, params, tokens, num_prompt_tokens) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 0.9999999])
def test_top_p_on_a_long_row_equals_the_naive_one(top_p: float) -> None:
    row = random_row(3, 5000) / 4  # flat: the nucleus is larger than the first guess
    params = replace(BASE, top_p=top_p)
    assert law(row, params, [0], 1) == pytest.approx(naive_law(row.tolist(), params, [0], 1), abs=1e-12)


@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.3)])
def test_equal_logits_at_the_border_are_kept_by_lowest_id(name: str, value: float) -> None:
    row = np.zeros(10, dtype=np.float32)
    row[7] = 0.5
    kept = candidates(row.astype(np.float64), replace(BASE, **{name: value}))
    assert kept.token_ids.tolist() == [0, 1, 7]


def test_the_order_of_the_filters_is_min_p_then_top_k_then_top_p() -> None:
    # p = 0.4 0.3 0.2 0.1. top_k 2 first leaves 4/7 and 3/7, of which top_p 0.5 keeps one; the other order keeps two.
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    kept = candidates(row.astype(np.float64), replace(BASE, top_k=2, top_p=0.5))
    assert kept.token_ids.tolist() == [0]
    # min_p 0.5 leaves three, of which top_p 0.75 needs two (7/9); top_p alone would need three.
    kept = candidates(row.astype(np.float64), replace(BASE, min_p=0.45, top_p=0.75))
    assert kept.token_ids.tolist() == [0, 1]


def test_bias_comes_before_the_penalties_and_masks_cannot_be_biased_away() -> None:
    row = np.array([1.0, 1.0, 1.0], dtype=np.float32)
    params = replace(BASE, logit_bias=((0, 3.0), (1, 100.0)), repetition_penalty=2.0, bad_words=((1,),))
    scores = adjusted_logits(row, SamplingRules(params, 3), History([0], 1))
    assert scores.tolist() == [2.0, -math.inf, 1.0]


def test_repetition_covers_prompt_and_output_but_frequency_and_presence_the_output_only() -> None:
    row = np.full(4, 2.0, dtype=np.float32)
    history = History([0, 1, 1, 2, 2], 2)  # prompt 0 1, output 1 2 2
    scores = adjusted_logits(row, SamplingRules(replace(BASE, repetition_penalty=2.0), 4), history)
    assert scores.tolist() == [1.0, 1.0, 1.0, 2.0]
    scores = adjusted_logits(
        row, SamplingRules(replace(BASE, frequency_penalty=0.5, presence_penalty=0.25), 4), history
    )
    assert scores.tolist() == [2.0, 1.25, 0.75, 2.0]


def test_a_bad_word_across_the_end_of_the_prompt_is_forbidden() -> None:
    params = replace(BASE, bad_words=((3, 4, 5),))
    row = np.zeros(8, dtype=np.float32)
    assert adjusted_logits(row, SamplingRules(params, 8), History([3, 4], 1))[5] == -math.inf
    assert adjusted_logits(row, SamplingRules(params, 8), History([4, 4], 1))[5] == 0.0
    assert adjusted_logits(row, SamplingRules(params, 8), History([4], 1))[5] == 0.0


def test_a_tiny_temperature_is_no_nan_and_picks_the_best() -> None:
    for temperature in (1e-5, 1e-300, 5e-324):
        kept = candidates(np.array([1.0, 3.0, 2.0]), replace(BASE, temperature=temperature))
        assert kept.token_ids[kept.probabilities().argmax()] == 1
        assert np.isfinite(kept.probabilities()).all()


@pytest.mark.parametrize(
    ("params", "mask", "words"),
    [
        (
            replace(BASE, allowed_token_ids=(2,), bad_words=((2,),)),
            None,
            r"allowed_token_ids \(1 ids\).*bad_words \(1\)",
        ),
        (
            replace(BASE, allowed_token_ids=(1, 2), stop_token_ids=frozenset({1, 2}), min_tokens=4),
            None,
            "min_tokens.*4",
        ),
        (replace(BASE, allowed_token_ids=()), None, "output position 1"),
        (BASE, np.zeros(VOCAB, dtype=bool), "structured-output"),
        (replace(BASE, temperature=0.0, allowed_token_ids=()), None, "no token is left"),
    ],
)
def test_no_token_left_is_said_in_words(params: SamplingParams, mask: np.ndarray | None, words: str) -> None:
    with pytest.raises(NoTokenLeft, match=words):
        adjusted_logits(random_row(0), SamplingRules(params, VOCAB), History([0, 1], 1), mask)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_in_the_logits_are_refused(value: float) -> None:
    row = random_row(0)
    row[5] = value
    with pytest.raises(InvalidLogits, match=str(value)):
        adjusted_logits(row, SamplingRules(replace(BASE, bad_words=((5,),)), VOCAB), History([0], 1))


def test_an_overflowing_penalty_is_refused() -> None:
    params = replace(BASE, repetition_penalty=1e-320)
    with pytest.raises(SamplingError, match="repetition_penalty"):
        adjusted_logits(np.ones(VOCAB, dtype=np.float32), SamplingRules(params, VOCAB), History([0], 1))


@pytest.mark.parametrize("params", [replace(BASE, allowed_token_ids=(1, 99)), replace(BASE, logit_bias=((-1, 1.0),))])
def test_ids_outside_of_the_vocabulary_are_refused_with_their_value(params: SamplingParams) -> None:
    with pytest.raises(SamplingError, match=r"99|-1"):
        SamplingRules(params, VOCAB)


def test_stop_and_bad_ids_outside_of_the_vocabulary_do_no_harm() -> None:
    params = replace(BASE, stop_token_ids=frozenset({3, 999}), min_tokens=3, bad_words=((999,), (0, 999), (999, 1)))
    scores = adjusted_logits(random_row(0), SamplingRules(params, VOCAB), History([0], 1))
    assert np.flatnonzero(scores == -math.inf).tolist() == [3]


def test_the_row_itself_is_left_alone() -> None:
    row = random_row(0)
    before = row.copy()
    params = replace(BASE, allowed_token_ids=(1, 2), logit_bias=((1, 5.0),), repetition_penalty=2.0, top_k=1)
    law(row, params, [1, 2], 1)
    assert np.array_equal(row, before)
