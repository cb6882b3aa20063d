"""What clients write can be swapped for placeholders, and no control token is left in what a template may see."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.chat.guard import Guard, _trie_pattern

SPELLINGS = ("<|im_end|>", "<|im_start|>", "<|im_start|>user", "<s>", "</s>", "<think>", "[INST]", "aab", "aa")
PLACEHOLDERS = ("\U00100000", "\U00100001", "\U0010fffd")

pieces = st.sampled_from([*SPELLINGS, *PLACEHOLDERS, "<|im_", "end|>", "|>", "<", ">", "a", "b", " ", "é", "\n", "[IN"])
texts = st.lists(pieces, max_size=8).map("".join)


def holds_a_spelling(text: str) -> bool:
    return any(spelling in text for spelling in SPELLINGS)


@given(texts)
def test_what_is_swapped_comes_back(text: str) -> None:
    guard = Guard(SPELLINGS)
    swapped = guard.swap(text)
    assert guard.restore(swapped) == text
    assert "".join(guard.split(swapped)) == text


@given(texts)
def test_no_spelling_is_left_in_a_text_and_none_between_what_was_swapped(text: str) -> None:
    guard = Guard(SPELLINGS)
    swapped = guard.swap(text)
    assert not holds_a_spelling(swapped)
    assert not any(map(holds_a_spelling, guard.split(swapped)[::2]))


@given(texts, texts, st.sampled_from(["", "|>", "<|", "<|im_start", "m_end|>"]))
def test_no_spelling_comes_about_where_texts_meet(first: str, second: str, between: str) -> None:
    guard = Guard(SPELLINGS)
    swapped = guard.swap(first) + between + guard.swap(second)
    found = [spelling for spelling in SPELLINGS if spelling in swapped and len(spelling) > 2]
    assert found == []


@given(texts)
def test_a_text_without_a_spelling_or_a_half_of_one_is_left_alone(text: str) -> None:
    plain = re.sub("[<>|\\[\U00100000-\U0010fffd]|aa", ".", text)
    assert Guard(SPELLINGS).swap(f".{plain}.") == f".{plain}."


@given(texts)
def test_names_and_values_of_objects_and_lists_are_swapped_alike(text: str) -> None:
    value: Any = {text: [text, {"x": text}, 1, None, True, 2.5]}
    guard = Guard(SPELLINGS)
    swapped = guard.swap(value)
    assert not holds_a_spelling(json.dumps(swapped, ensure_ascii=False))
    assert json.loads(guard.restore(json.dumps(swapped, ensure_ascii=False))) == value


def test_spellings_that_a_text_may_keep_stay_in_it() -> None:
    guard = Guard(SPELLINGS)
    swapped = guard.swap("a<think>b<s>c", keep={"<think>"})
    assert "<think>" in swapped
    assert guard.split(swapped) == ["a<think>b", "<s>", "c"]


@given(texts, st.lists(st.text("ab<|", min_size=1, max_size=4), min_size=1, max_size=8, unique=True))
def test_the_longest_spelling_is_found_first(text: str, spellings: list[str]) -> None:
    longest_first = "|".join(re.escape(each) for each in sorted(spellings, key=len, reverse=True))
    assert re.findall(_trie_pattern(spellings), text) == re.findall(longest_first, text)


def test_runs_of_spellings_are_one_piece() -> None:
    guard = Guard(SPELLINGS)
    assert guard.split("x" + guard.swap("<s></s><|im_end|>") + "y") == ["x", "<s></s><|im_end|>", "y"]


def test_placeholders_of_others_are_text() -> None:
    assert Guard(SPELLINGS).split("a\U00100005b") == ["a\U00100005b"]
