"""Incremental text: pieces joined are the whole; stops are found wherever the token borders lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import Tokenizer
from scheduler.request import TextDecision
from server.detokenize import MAX_HELD, REPLACEMENT, ChoiceText, IncrementalText
from tests.server.builders import EOS, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()

any_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), min_size=1, max_size=60)
TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("the quick ab \n 好今天😀é👩\u200d")),
    min_size=1,
    max_size=40,
)


def byte_id(byte: int) -> int:
    """The id of a single byte in the byte-level vocabulary."""
    return next(i for i in range(3, 259) if BYTE_LEVEL.token_bytes(i) == bytes([byte]))


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> list[str]:
    text = IncrementalText(tokenizer, skip_special)
    return [*(text.push(token_id) for token_id in ids), text.flush()]


def run(choice: ChoiceText, runs: Sequence[Sequence[int]]) -> tuple[int, str, str | None]:
    """(tokens kept, text, stop) of a choice whose tokens arrive in these runs; the last run ends it."""
    kept, text = 0, ""
    for i, ids in enumerate(runs):
        decision = choice.push(ids, is_last=i == len(runs) - 1)
        kept, text = kept + decision.num_kept, text + decision.text
        if decision.stopped:
            return kept, text, decision.stop_reason
    return kept, text, None


@given(any_ids, st.booleans())
def test_pieces_of_random_ids_join_to_the_whole_decode(ids: list[int], skip_special: bool) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip_special)) == BYTE_LEVEL.decode(ids, skip_special)


@given(TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
def test_pieces_of_a_text_join_to_it_and_never_hold_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in piece for piece in pieces)


@given(st.lists(st.integers(0, BYTE_FALLBACK.vocab_size - 1), min_size=1, max_size=40))
def test_byte_fallback_ids_that_are_text_join_to_the_whole_decode(ids: list[int]) -> None:
    # Where they are no text the decoder marks a whole run of bytes once one is wrong; what was given before stays.
    whole = BYTE_FALLBACK.decode(ids)
    joined = "".join(pieces_of(BYTE_FALLBACK, ids))
    assert joined == whole or REPLACEMENT in whole


def test_bytes_that_turn_out_wrong_later_do_not_take_back_what_was_given() -> None:
    ids = [BYTE_FALLBACK.encode("今")[-3:], [257], BYTE_FALLBACK.encode(".", add_special_tokens=False)]
    assert "".join(pieces_of(BYTE_FALLBACK, [i for part in ids for i in part])) == f"今{REPLACEMENT}."


def test_an_incomplete_character_is_held_until_its_last_byte() -> None:
    ids = [byte_id(byte) for byte in "😀".encode()]
    text = IncrementalText(BYTE_LEVEL)
    assert [text.push(token_id) for token_id in ids] == ["", "", "", "😀"]


def test_what_never_became_a_character_is_marked_at_the_end_only() -> None:
    text = IncrementalText(BYTE_LEVEL)
    assert text.push(byte_id("😀".encode()[0])) == ""
    assert text.flush() == REPLACEMENT


def test_invalid_bytes_without_end_are_given_in_bounded_windows() -> None:
    text = IncrementalText(BYTE_LEVEL)
    ids = [byte_id(0xFF)] * 200
    given = ""
    for token_id in ids:
        given += text.push(token_id)
        assert len(text._ids) <= 2 * MAX_HELD + 4
    assert given + text.flush() == BYTE_LEVEL.decode(ids)


def test_special_tokens_without_end_do_not_grow_the_window() -> None:
    text = IncrementalText(BYTE_LEVEL)
    special = BYTE_LEVEL.encode(EOS)[0]
    assert "".join(text.push(special) for _ in range(200)) == ""
    assert not text._ids


@given(TEXTS, st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=3), st.booleans(), st.data())
def test_a_stop_string_cuts_the_text_where_a_search_of_the_whole_finds_it_first(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    whole = BYTE_LEVEL.decode(ids)
    if data.draw(st.booleans()) and whole:
        start = data.draw(st.integers(0, len(whole) - 1))
        stops = [*stops, whole[start : start + data.draw(st.integers(1, 5))]]
    choice = ChoiceText(BYTE_LEVEL, stop=stops, include_stop=include)
    kept, got, stop = run(choice, [[token_id] for token_id in ids])
    ends = [whole.find(s) + len(s) for s in stops if s in whole]
    if not ends:
        assert (kept, got, stop) == (len(ids), whole, None)
        return
    assert stop in stops
    # The stop whose end comes first ends the choice, for its last character ends the generation.
    prefix = got if include else got + stop
    assert whole.startswith(prefix)
    assert prefix.endswith(stop)
    reached = BYTE_LEVEL.decode(ids[:kept])
    assert any(s in reached for s in stops)
    assert not any(s in BYTE_LEVEL.decode(ids[: kept - 1]).rstrip(REPLACEMENT) for s in stops)


@given(
    any_ids, st.lists(st.sampled_from(["the", " ", "o", "a\n", "好", "😀"]), max_size=3), st.integers(0, 4), st.data()
)
def test_how_tokens_are_cut_into_runs_changes_nothing(
    ids: list[int], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids)), max_size=8)) | {0, len(ids)})
    runs = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    one = run(ChoiceText(BYTE_LEVEL, stop=stops, min_tokens=min_tokens), [ids])
    assert run(ChoiceText(BYTE_LEVEL, stop=stops, min_tokens=min_tokens), runs) == one


def test_the_earliest_of_several_stops_wins() -> None:
    ids = BYTE_LEVEL.encode("one two three")
    assert run(ChoiceText(BYTE_LEVEL, stop=["three", "two", "wo"]), [ids])[1:] == ("one ", "two")


def test_text_that_may_become_a_stop_is_held_and_given_when_it_does_not() -> None:
    choice = ChoiceText(BYTE_LEVEL, stop=["abx"])
    assert [choice.push([byte_id(byte)], is_last=False).text for byte in b"ababc"] == ["", "", "ab", "", "abc"]


def test_held_text_is_flushed_at_the_end() -> None:
    choice = ChoiceText(BYTE_LEVEL, stop=["world!"])
    ids = BYTE_LEVEL.encode("Hello, world")
    assert run(choice, [ids[:2], ids[2:]])[1] == "Hello, world"


@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, f"Hello{EOS}")])
def test_a_stop_token_gives_text_only_if_the_stop_is_included(include: bool, text: str) -> None:
    special = BYTE_LEVEL.encode(EOS)[0]
    ids = [*BYTE_LEVEL.encode("Hello"), special]
    choice = ChoiceText(
        BYTE_LEVEL, include_stop=include, skip_special_tokens=False, stop_token_ids=frozenset({special})
    )
    assert choice.push(ids, is_last=True).text == text


def test_stop_strings_count_from_min_tokens_on() -> None:
    ids = [byte_id(byte) for byte in b"a.b.c.d"]
    kept, text, stop = run(ChoiceText(BYTE_LEVEL, stop=["."], min_tokens=3), [ids])
    assert (kept, text, stop) == (4, "a.b", ".")


def test_token_texts_join_to_the_text_before_any_stop_holds_back() -> None:
    ids = BYTE_LEVEL.encode("今天 the quick 😀")
    decision = ChoiceText(BYTE_LEVEL, stop=["zzz"]).push(ids, is_last=True)
    assert "".join(decision.token_texts) == decision.text == "今天 the quick 😀"
    assert len(decision.token_texts) == len(ids)


def test_an_ended_filter_takes_no_more_tokens() -> None:
    choice = ChoiceText(BYTE_LEVEL)
    assert isinstance(choice.push([5], is_last=True), TextDecision)
    with pytest.raises(ValueError, match="ended"):
        choice.push([5], is_last=True)
