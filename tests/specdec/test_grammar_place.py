"""A sequence's place in its grammar is a function of its tokens, and masks say what the grammar says."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from specdec.errors import SamplingError
from specdec.grammar.compiler import (
    MAX_GRAMMAR_BYTES,
    MAX_ROW_ITEMS,
    GrammarCache,
    GrammarCompiler,
    GrammarError,
    NoGrammars,
    TokenizerText,
    estimated_bytes,
)
from specdec.grammar.constraint import GrammarConstraint
from specdec.grammar.place import MAX_CHECKED_DRAFTS, GrammarPlace, GrammarTooComplex
from specdec.grammar.text import choice, json_schema, lark, regex
from specdec.params import SamplingParams
from tests.specdec.builders import VOCAB
from tests.specdec.grammar_builders import (
    EOS,
    GRAMMARS,
    ambiguous,
    ids,
    toy_cache,
    toy_compiler,
    toy_tokenizer,
    written,
)

COMPILER = toy_compiler()
CACHE = GrammarCache(COMPILER, 2**30)
MANY_STATES = regex("(a|b)*a(a|b){12}")


def _property(i: int, j: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}}


def fresh(grammar: str, tokens: list[int], cache: GrammarCache = CACHE) -> GrammarPlace:
    place = GrammarPlace(cache, grammar)
    place.move_to(tokens)
    return place


def accepts(grammar: str, text: str) -> bool:
    """By llguidance itself, byte by byte, without any of our code but the compiler."""
    matcher: LLMatcher = COMPILER.compile(grammar)
    tokens = [toy_tokenizer().token_to_id(char) for char in text]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def path(grammar: str, turns: list[int]) -> list[int]:
    """Some allowed tokens, chosen by ``turns``; it ends before an end-of-text token."""
    tokens: list[int] = []
    place = GrammarPlace(CACHE, grammar)
    for turn in turns:
        place.move_to(tokens)
        allowed = np.flatnonzero(place.mask())
        allowed = allowed[allowed != EOS]
        if not len(allowed):
            break
        tokens.append(int(allowed[turn % len(allowed)]))
    return tokens


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.integers(0, 12)),
        st.tuples(st.just("forced"), st.integers(1, 6)),
        st.tuples(st.just("allowed"), st.integers(0, 2**30)),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(GRAMMARS)), st.lists(st.integers(0, 99), min_size=3, max_size=12), OPERATIONS)
def test_the_state_is_that_of_a_fresh_matcher_behind_the_same_tokens(
    name: str, turns: list[int], operations: list[tuple[str, int]]
) -> None:
    grammar, tokens = GRAMMARS[name], path(GRAMMARS[name], turns)
    place, at = GrammarPlace(CACHE, grammar), 0
    for operation, number in operations:
        if operation == "move":
            at = min(number, len(tokens))
            place.move_to(tokens[:at])
        elif operation == "forced":
            assert len(place.forced(number)) <= number
        else:
            rng = np.random.default_rng(number)
            draft = [*tokens[at : at + int(rng.integers(4))], *rng.integers(0, VOCAB, 3).tolist()]
            assert place.num_allowed(draft) == fresh(grammar, tokens[:at]).num_allowed(draft)
        assert (place.mask() == fresh(grammar, tokens[:at]).mask()).all()


@pytest.mark.parametrize("name", GRAMMARS)
def test_end_of_text_may_come_exactly_where_the_grammar_accepts(name: str) -> None:
    for seed in range(3):
        tokens = path(GRAMMARS[name], np.random.default_rng(seed).integers(0, 99, 14).tolist())
        for end in range(len(tokens) + 1):
            mask = fresh(GRAMMARS[name], tokens[:end]).mask()
            assert mask[EOS] == accepts(GRAMMARS[name], written(tokens[:end]))


def test_a_mask_allows_each_token_whose_text_can_follow_or_the_tokenizers_own_where_the_text_is_forced() -> None:
    texts = ["abcabc", "abk", "true", "012"]
    for behind in ("", "a", "ab", "abc", "tr", "01"):
        place = fresh(choice(texts), ids(behind))
        can_follow = [
            token for token in range(1, VOCAB) if any(whole.startswith(behind + written([token])) for whole in texts)
        ]
        forced = place.forced(1)
        assert set(forced) <= set(can_follow)
        assert np.flatnonzero(place.mask()).tolist() == (forced or can_follow), behind


def test_what_is_forced_is_what_must_follow() -> None:
    place = fresh(choice(["abcabc", "abctrue"]), [])
    assert written(place.forced(9)) == "abc"
    assert len(place.forced(1)) == 1
    place = fresh(choice(["true012k"]), ids("tr"))
    whole = place.forced(9)
    assert whole
    assert "ue012k".startswith(written(whole))
    for end in range(1, len(whole)):
        place.move_to([*ids("tr"), *whole[:end]])
        assert place.forced(9) == whole[end:]


@pytest.mark.parametrize("grammar", [choice(["a<e>b"]), json_schema({"const": "a<e>b"})], ids=["lark", "schema"])
def test_forced_text_that_spells_a_special_token_stays_text(grammar: str) -> None:
    place, tokens = GrammarPlace(CACHE, grammar), list[int]()
    while not place.mask()[EOS]:
        assert EOS not in place.forced(9)
        tokens.append(int(place.mask().argmax()))
        place.move_to(tokens)
    assert written(tokens).strip('"') == "a<e>b"


def test_tokens_that_the_grammar_does_not_allow_are_an_error_and_hurt_nothing() -> None:
    place = GrammarPlace(CACHE, choice(["ab"]))
    with pytest.raises(SamplingError):
        place.move_to(ids("x"))
    place = fresh(choice(["ab"]), [])
    assert place.num_allowed(ids("x")) == 0
    assert place.num_allowed([*ids("ab"), EOS, *ids("x")]) == 1 + len(ids("ab"))
    assert place.num_allowed([EOS]) == 0


def test_who_exhausts_the_lexer_changes_no_mask_of_others() -> None:
    cache = GrammarCache(
        GrammarCompiler(TokenizerText(toy_tokenizer().to_str(), VOCAB, (EOS,)), max_lexer_states=400), 2**30
    )
    first, second = GrammarPlace(cache, MANY_STATES), GrammarPlace(cache, MANY_STATES)
    tokens = path(MANY_STATES, np.random.default_rng(0).integers(0, 99, 120).tolist())
    other = path(MANY_STATES, np.random.default_rng(1).integers(0, 99, 120).tolist())
    for end in range(120):
        first.move_to(tokens[:end])
        second.move_to(other[:end])
        assert (first.mask() == fresh(MANY_STATES, tokens[:end]).mask()).all()
        assert (second.mask() == fresh(MANY_STATES, other[:end]).mask()).all()


def test_the_cache_keeps_to_its_bytes_and_always_keeps_the_newest() -> None:
    grammars = [choice(["a" * n]) for n in range(1, 9)]
    cache = toy_cache(3 * estimated_bytes(grammars[-1]))
    for grammar in grammars:
        cache.matcher(grammar)
        assert grammar in cache
        assert cache.memory_bytes <= cache.max_bytes
        assert cache.memory_bytes == sum(estimated_bytes(held) for held in grammars if held in cache)
    assert grammars[0] not in cache
    cache.matcher(grammars[5])
    cache.matcher(grammars[0])
    assert grammars[5] in cache, "the least recently used leaves first"
    tiny = toy_cache(0)
    tiny.matcher(grammars[0])
    tiny.matcher(grammars[1])
    assert grammars[1] in tiny
    assert len(tiny) == 1


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("((("), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (ambiguous(200), "ways to go on"),
        (regex("[^\\s\\S]"), "allows no output"),
        (lark('start: "a" other'), "cannot be compiled"),
        (lark(""), "cannot be compiled"),
        (json_schema({"type": "foo"}), "cannot be compiled"),
        (json_schema({"allOf": [{"type": "string"}, {"type": "number"}]}), "Unsatisfiable"),
        (json_schema({"$ref": "#"}), "allows no output"),
        (json_schema({"$ref": "http://localhost/schema"}), "cannot be compiled"),
        (json_schema({"allOf": [{"anyOf": [_property(i, j) for j in range(8)]} for i in range(8)]}), "too large"),
        (json_schema({"const": "a" * MAX_GRAMMAR_BYTES}), "larger"),
        ("nonsense", "cannot be compiled"),
    ],
    ids=lambda value: value[13:40],
)
def test_a_grammar_that_cannot_be_used_is_refused_in_one_line(grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as error:
        COMPILER.compile(grammar)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("term", ["/[abck]/", '"abc" | "k"', "/0?[a-c]+/"])
@pytest.mark.parametrize("n", [12, 20, 40, 60])
def test_an_ambiguous_grammar_fails_before_its_calls_take_long(n: int, term: str) -> None:
    """What the last token cost is the square of what the message says, and each one before it cost less."""
    grammar, tokens = ambiguous(n, term), ids(("abck" if "k" in term else "abc0") * 100)

    def go() -> None:
        place = GrammarPlace(CACHE, grammar)
        for end in range(len(tokens)):
            place.move_to(tokens[:end])
            place.mask()

    with pytest.raises((GrammarError, GrammarTooComplex)) as caught:
        go()
    assert "too complex" in str(caught.value)
    (items,) = re.findall(r"(\d+) ways to go on", str(caught.value))
    assert int(items) < 1.5 * MAX_ROW_ITEMS or "more than" in str(caught.value)


def test_drafts_that_run_into_a_limit_cost_nothing_but_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar, tokens = ambiguous(12), ids("abck" * 20)
    place = fresh(grammar, tokens[:2])
    before = place.mask()
    matcher = place._matcher
    assert place.num_allowed(tokens[2:4]) == 2
    assert place.num_allowed(tokens[2:]) == 0
    monkeypatch.setattr(place, "_renew", lambda: pytest.fail("it went all the way again"))
    assert place.num_allowed(tokens[2:4]) == 0, "checked no more"
    assert place._matcher is matcher
    assert (place.mask() == before).all()
    place.move_to(tokens[:4])
    assert (place.mask() == fresh(grammar, tokens[:4]).mask()).all()


def test_a_step_checks_a_bounded_number_of_drafts() -> None:
    constraint = GrammarConstraint(CACHE)
    tokens = ids("a" * 100)
    params = SamplingParams(seed=1, grammar=regex("a*"))
    sequence: Any = SimpleNamespace(seq_id=0, params=params, output_token_ids=[])
    assert fresh(regex("a*"), []).num_allowed(tokens) == 100
    assert constraint.num_allowed(sequence, tokens) == MAX_CHECKED_DRAFTS
    assert len(fresh(choice(["ab0" * 40]), []).forced(99)) <= MAX_CHECKED_DRAFTS


def test_a_choice_may_be_one_of_4096_texts() -> None:
    texts = ["".join("abck012x"[i >> shift & 7] for shift in (9, 6, 3, 0)) + "true" * 5 for i in range(4096)]
    grammar = choice([*texts, texts[0]])
    for text in texts[::500]:
        place, tokens = GrammarPlace(CACHE, grammar), ids(text)
        for end in range(len(tokens)):
            place.move_to(tokens[:end])
            assert place.mask()[tokens[end]]
        place.move_to(tokens)
        assert np.flatnonzero(place.mask()).tolist() == [EOS]
    assert fresh(choice(["", "ab"]), []).mask()[EOS]
    assert fresh(choice([""]), []).mask()[EOS]
    assert not fresh(choice(["ab"]), []).mask()[EOS]


def test_several_end_of_text_tokens_are_all_allowed_at_the_end() -> None:
    place = GrammarPlace(GrammarCache(toy_compiler((EOS, 7)), 2**30), choice(["ab"]))
    place.move_to(ids("ab"))
    assert np.flatnonzero(place.mask()).tolist() == [EOS, 7]


def test_a_tokenizer_that_cannot_be_had_is_refused_with_a_reason() -> None:
    with pytest.raises(NoGrammars, match="end-of-text"):
        GrammarCompiler(TokenizerText(toy_tokenizer().to_str(), VOCAB, ()))
    with pytest.raises(NoGrammars, match="its tokenizer cannot be used"):
        GrammarCompiler(TokenizerText('{"model": 1}', VOCAB, (EOS,)))


def test_a_pattern_with_slashes_and_line_breaks_is_what_it_says() -> None:
    for pattern, text in (("a/b", "a/b"), ("a\\/b", "a/b"), ("a\nb", "a\nb"), ("\\\\/", "\\/"), ("[/]x", "/x")):
        matcher = LLMatcher(_byte_tokenizer(), regex(pattern))
        assert matcher.try_consume_tokens(list(text.encode())) == len(text), pattern
        assert matcher.is_accepting(), pattern


@pytest.mark.parametrize(
    "text", ["".join(map(chr, range(0x180))), "\u2028\u2029\ufeff\uffff\U0010ffff", '\\u007f\\"//']
)
def test_a_choice_is_its_text_whatever_characters_that_has(text: str) -> None:
    matcher, data = LLMatcher(_byte_tokenizer(), choice([text])), text.encode()
    assert matcher.try_consume_tokens(list(data)) == len(data)
    assert matcher.is_accepting()


def _byte_tokenizer() -> object:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
