"""The grammars of tool calls: what they allow is what the parser takes for calls, whole and valid."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest

from server.tools.deltas import JoinedDeltas
from server.tools.formats import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from server.tools.grammar import AddedTokens, optional_calls, required_calls
from server.tools.parser import ToolParser
from specdec.grammar.compiler import GrammarCache, GrammarCompiler, TokenizerText
from specdec.grammar.place import GrammarPlace
from specdec.grammar.text import choice, json_schema, regex
from tests.server.tool_builders import (
    TOOLS,
    added_tokens,
    arguments_are_valid,
    function,
    functions,
    tool_tokenizer,
)

FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON)
BY_NAME = pytest.mark.parametrize("tool_format", FORMATS, ids=["hermes", "llama3", "mistral", "mistral args", "json"])
TOKENIZER = tool_tokenizer()
TOKENS = added_tokens(TOKENIZER)
(EOS_ID,) = TOKENS.ends
MARKERS = {marker for each in FORMATS for marker in each.markers}
# The same formats where their markers are no tokens.
SPELLED = AddedTokens(
    {i: text for i, text in TOKENS.spellings.items() if text not in MARKERS}, TOKENS.special, TOKENS.ends
)


@cache
def grammars(tokens_are_spelled: bool) -> GrammarCache:
    """Compiled for the tokenizer, or for one of the same ids that knows no markers."""
    serialized = TOKENIZER.serialized
    assert serialized is not None
    if tokens_are_spelled:
        value = json.loads(serialized)
        value["added_tokens"] = [token for token in value["added_tokens"] if token["content"] not in MARKERS]
        serialized = json.dumps(value)
    return GrammarCache(GrammarCompiler(TokenizerText(serialized, TOKENIZER.vocab_size, (EOS_ID,))), 10**8)


class Writer:
    """Writes at random what a grammar allows, behind a beginning."""

    def __init__(self, grammar: str, seed: int, *, spelled: bool = False) -> None:
        self._place = GrammarPlace(grammars(spelled), grammar)
        self._random = random.Random(seed)
        self.ids: list[int] = []

    def begin(self, ids: list[int]) -> Writer:
        assert self._place.num_allowed(ids) == len(ids), (TOKENIZER.decode(ids, False), self._place.num_allowed(ids))
        self._move(ids)
        return self

    def go_on(self, most: int = 150) -> bool:
        """Whether it came to its end. Ends wherever that is allowed."""
        for _ in range(most):
            allowed = np.flatnonzero(self._place.mask())
            if EOS_ID in allowed:
                return True
            self._move([int(self._random.choice(allowed))])
        return False

    def allowed(self) -> list[int]:
        return [int(i) for i in np.flatnonzero(self._place.mask())]

    def _move(self, ids: list[int]) -> None:
        self.ids += ids
        self._place.move_to(self.ids)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def read(
    ids: list[int], tool_format: ToolFormat, *, parallel: bool = True, cut: int = 1
) -> tuple[str, list[tuple[str, str]], bool]:
    """As the server reads an answer: with the format's markers in the text, and no other special token."""
    marker_ids = {i for i, text in TOKENS.spellings.items() if text in tool_format.markers}
    text = TOKENIZER.decode([i for i in ids if i not in TOKENS.special or i in marker_ids], False)
    hidden = [TOKENS.spellings[i] for i in marker_ids & TOKENS.special]
    names = [tool["function"]["name"] for tool in TOOLS]
    parser = ToolParser(tool_format, names, parallel=parallel, enforced=True, hidden=hidden)
    joined = JoinedDeltas()
    for start in range(0, len(text), cut):
        joined.add(parser.push(text[start : start + cut]))
    joined.add(parser.finish())
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in joined.tool_calls]
    return joined.content, calls, parser.unfinished


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("spelled", [False, True])
@BY_NAME
def test_a_required_answer_is_nothing_but_valid_calls(tool_format: ToolFormat, spelled: bool, parallel: bool) -> None:
    grammar = required_calls(tool_format, functions(TOOLS), SPELLED if spelled else TOKENS, parallel=parallel)
    seen = set()
    for seed in range(5):
        writer = Writer(grammar, seed, spelled=spelled)
        assert writer.go_on(1000)
        content, calls, unfinished = read(writer.ids, tool_format, parallel=parallel, cut=1 + seed)
        assert (content, unfinished) == ("", False)
        assert len(calls) == 1 or (len(calls) > 1 and parallel)
        for name, arguments in calls:
            assert arguments_are_valid(name, arguments), arguments
            seen.add(name)
    assert len(seen) > 1


@BY_NAME
def test_only_with_parallel_another_call_may_follow(tool_format: ToolFormat) -> None:
    # A list goes on inside; the others behind a call.
    for parallel in (False, True):
        grammar = required_calls(tool_format, functions([function("now")]), TOKENS, parallel=parallel)
        writer = Writer(grammar, 0)
        if tool_format.prefer_list:
            writer.begin(encode('[TOOL_CALLS][{"name": "now", "arguments": {}}'))
            other = set(writer.allowed()) - set(encode("]"))
        else:
            assert writer.go_on()
            other = set(writer.allowed()) - {EOS_ID}
        assert bool(other) == parallel


OPENINGS = {
    HERMES: "<tool_call>",
    LLAMA3: "<|python_tag|>",
    MISTRAL: "[TOOL_CALLS]",
    MISTRAL_ARGS: "[TOOL_CALLS]",
}


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("before", ["", "the fox ", "  \n", "<think>plain<|im_start|>", "\n<|im_start|>{"])
@pytest.mark.parametrize("tool_format", OPENINGS, ids=lambda each: each.arguments_key + each.inner.__str__()[:3])
def test_behind_an_opening_in_free_text_a_valid_call_follows(
    tool_format: ToolFormat, before: str, spelled: bool
) -> None:
    opening = OPENINGS[tool_format]
    if tool_format.bare and before.strip("\n ").startswith("<|im_start|>"):
        return  # where calls have no opening, a text begins with what is seen of it
    grammar = optional_calls(tool_format, functions(TOOLS), TOKENS, parallel=False)
    for seed in range(2):
        writer = Writer(grammar, seed).begin(encode(before))
        # As its token, or written out.
        writer.begin(encode(opening[:-1]) + encode(opening[-1]) if spelled else encode(opening))
        assert EOS_ID not in writer.allowed()
        assert writer.go_on()
        content, calls, unfinished = read(writer.ids, tool_format, parallel=False, cut=2)
        assert content == before.replace("<|im_start|>", "").rstrip()
        ((name, arguments),) = calls
        assert not unfinished
        assert arguments_are_valid(name, arguments), arguments


@pytest.mark.parametrize("tool_format", [LLAMA3, JSON], ids=["llama3", "json"])
@pytest.mark.parametrize("head", ['{"name": "add", "KEY":', ' \n{ "name" :"add"\n,"KEY" :'])
def test_a_text_that_begins_as_a_call_goes_on_as_a_valid_one(tool_format: ToolFormat, head: str) -> None:
    grammar = optional_calls(tool_format, functions(TOOLS), TOKENS, parallel=False)
    for seed in range(3):
        writer = Writer(grammar, seed).begin(encode(head.replace("KEY", tool_format.arguments_key)))
        assert writer.go_on()
        content, ((name, arguments),), unfinished = read(writer.ids, tool_format, parallel=False)
        assert (content, name, unfinished) == ("", "add", False)
        assert arguments_are_valid(name, arguments), arguments


@BY_NAME
@pytest.mark.parametrize(
    "text",
    [
        "",
        "the quick brown fox 好\n",
        '{"name": "unknown", "arguments": ',
        '{"name": "ad',
        "<think>plain</tool_call>",
        'x {"name": "add", "parameters": ',
        "<|im_start|>the" + "[ARGS]",
        "< tool_call>",
    ],
)
def test_other_text_is_free(tool_format: ToolFormat, text: str) -> None:
    ids = encode(text)
    if tool_format.bare and ids and ids[0] in TOKENS.special:
        return  # where calls have no opening, a text begins with what is seen of it
    writer = Writer(optional_calls(tool_format, functions(TOOLS), TOKENS, parallel=True), 0).begin(ids)
    allowed = set(writer.allowed())
    assert EOS_ID in allowed
    _, calls, unfinished = read(ids, tool_format)
    assert (calls, unfinished) == ([], False)
    ascii_ids = {
        i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i).isascii() and i not in TOKENS.spellings
    }
    assert ascii_ids <= allowed


@pytest.mark.parametrize("seed", range(8))
@BY_NAME
def test_whatever_is_written_under_a_grammar_no_call_stays_unfinished(tool_format: ToolFormat, seed: int) -> None:
    """From fragments of calls, as far as the grammar lets them be written, then at random."""
    fragments = [
        "{",
        '"name"',
        ": ",
        '"add"',
        ", ",
        f'"{tool_format.arguments_key}"',
        "}",
        "[",
        "\n",
        "; ",
        "plain",
        "a",
    ]
    fragments += [*tool_format.markers, "<|im_start|>", '{"name": "add", "arguments": {"a": 1}}']
    chosen = random.Random(seed)
    writer = Writer(optional_calls(tool_format, functions(TOOLS), TOKENS, parallel=True), seed)
    for _ in range(8):
        ids = encode(chosen.choice(fragments))
        if writer._place.num_allowed(ids) == len(ids) and EOS_ID not in ids:
            writer.begin(ids)
    if writer.go_on():
        _, calls, unfinished = read(writer.ids, tool_format)
        assert not unfinished
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


def test_strict_decides_what_becomes_of_keywords_that_no_grammar_knows() -> None:
    odd = {
        "type": "object",
        "properties": {"a": {"type": "string", "contentEncoding": "base64", "not": {"const": "x"}}},
    }
    lenient = required_calls(HERMES, functions([function("f", odd)]), TOKENS, parallel=False)
    Writer(lenient, 0)
    strict = required_calls(HERMES, functions([function("f", odd, strict=True)]), TOKENS, parallel=False)
    with pytest.raises(ValueError, match="cannot be compiled"):
        Writer(strict, 0)


def test_references_inside_parameters_are_their_own() -> None:
    one = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/t"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    tools = functions(
        [
            function("f", {**one, "$defs": {"t": {"const": "from f"}}}),
            function("g", {**one, "$defs": {"t": {"const": "from g"}}}),
        ]
    )
    for name in "fg":
        writer = Writer(required_calls(JSON, tools, TOKENS, parallel=False), 0).begin(encode(f'{{"name": "{name}'))
        assert writer.go_on()
        assert json.loads(TOKENIZER.decode(writer.ids)) == {"name": name, "arguments": {"x": f"from {name}"}}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (choice(["<tool_call>x"]), "<tool_call>x"),
        (json_schema({"const": "a<|python_tag|>"}), '"a<|python_tag|>"'),
        (regex(r"<\|endoftext\|>x"), "<|endoftext|>x"),
    ],
)
def test_a_special_token_that_a_grammar_spells_is_written_as_text(grammar: str, text: str) -> None:
    writer = Writer(grammar, 0)
    assert writer.go_on()
    assert TOKENIZER.decode(writer.ids, skip_special_tokens=True) == text
    assert not TOKENS.special.intersection(writer.ids)


def test_names_that_begin_alike_are_told_apart() -> None:
    tools = functions([function("add"), function("add_all"), function("ad")])
    grammar = required_calls(HERMES, tools, TOKENS, parallel=False)
    names = set()
    for seed in range(20):
        writer = Writer(grammar, seed)
        assert writer.go_on()
        names.add(json.loads(TOKENIZER.decode(writer.ids[1:-1], False))["name"])
    assert names == {"add", "add_all", "ad"}
