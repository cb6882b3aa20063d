"""From text to content and tool calls: every format, every way of cutting the text."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.deltas import Arguments, CallStart, Content, Delta, JoinedDeltas
from server.tools.formats import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from server.tools.parser import MAX_SPACE, ToolParser
from server.tools.scan import Event, ObjectScanner

NAMES = ("get_weather", "add")
FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON)

Answer = tuple[str, list[tuple[str, str]], bool]


def parse(tool_format: ToolFormat, pieces: list[str], **options: object) -> Answer:
    """Content, calls as (name, arguments), and whether the last call is unfinished."""
    parser = ToolParser(tool_format, NAMES, **options)  # type: ignore[arg-type]
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    check_order(deltas)
    joined = JoinedDeltas()
    joined.add(deltas)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in joined.tool_calls]
    assert parser.num_calls == len(calls)
    return joined.content, calls, parser.unfinished


def check_order(deltas: list[Delta]) -> None:
    """As clients join them: each call starts once, in order, and only its own arguments follow before the next."""
    started = 0
    for delta in deltas:
        match delta:
            case CallStart(index, call_id, _):
                assert index == started
                assert call_id
                started += 1
            case Arguments(index, text):
                assert index == started - 1
                assert text
            case Content(text):
                assert text


def whole(tool_format: ToolFormat, text: str, **options: object) -> Answer:
    return parse(tool_format, [text], **options)


W = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
A = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'
BERN = ("get_weather", '{"city": "Bern"}')
SUM = ("add", '{"a": 1, "b": [2]}')
P = W.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        (HERMES, "Hello there. ", "Hello there. ", []),
        (HERMES, f"<tool_call>\n{W}\n</tool_call>", "", [BERN]),
        (HERMES, f"Let me look.\n\n<tool_call>\n{W}\n</tool_call>\n", "Let me look.", [BERN]),
        (HERMES, f"<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{A}\n</tool_call>", "", [BERN, SUM]),
        (HERMES, f"<tool_call>{W}</tool_call> and then", " and then", [BERN]),
        (HERMES, f"<tool_call>{W}", "", [BERN]),
        (HERMES, f"<tool_call>{W}\n</tool_c", "", [BERN]),
        (HERMES, f"<tool_call>{W}\n<tool_call>{A}", "", [BERN, SUM]),
        (HERMES, f"<tool_call>[{W}, {A}]</tool_call>", "", [BERN, SUM]),
        (HERMES, f"< tool_call>{W}", f"< tool_call>{W}", []),
        (HERMES, f"<tool_call>{W}</tool_call>.", ".", [BERN]),
        (LLAMA3, P, "", [BERN]),
        (LLAMA3, f"\n\n{P}", "", [BERN]),
        (LLAMA3, f"<|python_tag|>{P}", "", [BERN]),
        (LLAMA3, f"{P}; {P}", "", [BERN, BERN]),
        (LLAMA3, f"{P}\n{P}", "", [BERN, BERN]),
        (LLAMA3, f"Sure. {P}", f"Sure. {P}", []),
        (LLAMA3, f"Sure. <|python_tag|>{P}", "Sure.", [BERN]),
        (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (LLAMA3, '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        (MISTRAL, f"[TOOL_CALLS] [{W}, {A}]", "", [BERN, SUM]),
        (MISTRAL, f"[TOOL_CALLS]{W}", "", [BERN]),
        (MISTRAL, f"Text [TOOL_CALLS][{W}]", "Text", [BERN]),
        (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}', "", [BERN]),
        (MISTRAL_ARGS, '[TOOL_CALLS]get_weather[CALL_ID]aB3[ARGS]{"city": "Bern"}', "", [BERN]),
        (MISTRAL_ARGS, '[TOOL_CALLS]get_weather{"city": "Bern"}', "", [BERN]),
        (
            MISTRAL_ARGS,
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}',
            "",
            [BERN, SUM],
        ),
        (MISTRAL_ARGS, "[TOOL_CALLS]I will look", "[TOOL_CALLS]I will look", []),
        (JSON, W, "", [BERN]),
        (JSON, f"[{W}, {A}]", "", [BERN, SUM]),
        (JSON, f"{W}\n{A}", "", [BERN, SUM]),
        (JSON, "[1] is a source", "[1] is a source", []),
        (JSON, '{"answer": 3}', '{"answer": 3}', []),
    ],
)
def test_calls_are_found_as_each_format_writes_them(
    tool_format: ToolFormat, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert whole(tool_format, text) == (content, calls, False)
    assert parse(tool_format, list(text)) == (content, calls, False)


NO_CALLS = [
    "<tool_call>",
    "<tool_call>\n",
    f"<tool_call>{W[:-1]}",
    f"<tool_call>{W[:-2]},}}}}</tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1"}</tool_call>',
    '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    "<tool_call>[]</tool_call>",
    "<tool_call>get_weather(Bern)</tool_call>",
    f"{{'name': 'add'}} <tool_cal {W}",
]


@pytest.mark.parametrize("text", NO_CALLS)
@pytest.mark.parametrize("enforced", [False, True])
def test_what_is_no_valid_call_stays_content_to_the_character(text: str, enforced: bool) -> None:
    for pieces in ([text], list(text)):
        content, calls, unfinished = parse(HERMES, pieces, enforced=enforced)
        if enforced and text.startswith(f"<tool_call>{W[:30]}"):
            assert [name for name, _ in calls] == ["get_weather"]  # a grammar lets nothing begin that is no call
        else:
            assert (content, calls, unfinished) == (text, [], False)


def test_behind_an_invalid_call_the_next_one_is_found() -> None:
    text = f'<tool_call>{{"name": oops}}</tool_call><tool_call>{W}</tool_call>'
    assert whole(HERMES, text) == ('<tool_call>{"name": oops}</tool_call>', [BERN], False)
    text = f'<tool_call>{{"name": <tool_call>{W}</tool_call>'
    assert whole(HERMES, text) == ('<tool_call>{"name":', [BERN], False)


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_call>", "[TOOL_CALLS]", '\\"}}', "<|python_tag|>", "; {"])
def test_markers_inside_a_json_string_are_part_of_it(tool_format: ToolFormat, inside: str) -> None:
    key, arguments = tool_format.arguments_key, f'{{"city": "{inside}"}}'
    text = f'{tool_format.opening or ""}{{"name": "get_weather", "{key}": {arguments}}}'
    for enforced in (False, True):
        assert parse(tool_format, list(text), enforced=enforced) == ("", [("get_weather", arguments)], False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('"{\\"a\\": \\"\\u00e9\\"}"', '{"a": "é"}'),
        ("null", "{}"),
        ('{"a": "\\u00e9\\ud83d\\ude00"}', '{"a": "\\u00e9\\ud83d\\ude00"}'),
        ('{ "a" :\t1 }', '{ "a" :\t1 }'),
    ],
)
def test_arguments_are_an_object_as_the_model_wrote_it(arguments: str, expected: str) -> None:
    text = f'<tool_call>{{"arguments": {arguments}, "na\\u006de": "\\u0061dd"}}</tool_call>'
    assert whole(HERMES, text) == ("", [("add", expected)], False)


def test_without_parallel_one_call_is_taken_and_the_rest_is_content() -> None:
    text = f"<tool_call>{W}</tool_call> <tool_call>{A}</tool_call>"
    assert whole(HERMES, text, parallel=False) == (f" <tool_call>{A}</tool_call>", [BERN], False)
    assert whole(JSON, f"[{W}, {A}]", parallel=False) == (f", {A}]", [BERN], False)
    assert whole(LLAMA3, f"{P}; {P}", parallel=False) == (f"; {P}", [BERN], False)


def test_under_a_grammar_arguments_are_given_as_they_come() -> None:
    parser = ToolParser(HERMES, NAMES, enforced=True)
    assert parser.push('<tool_call>\n{"name": "get_weather", "arguments": ') == []
    start, piece = parser.push('{"ci')
    assert isinstance(start, CallStart)
    assert piece == Arguments(0, '{"ci')
    assert parser.push('ty": "B') == [Arguments(0, 'ty": "B')]
    assert parser.unfinished
    assert parser.push('ern"}}\n</tool') == [Arguments(0, 'ern"}')]
    assert not parser.unfinished


def test_under_a_grammar_a_call_that_is_cut_off_stays_an_unfinished_call() -> None:
    assert whole(HERMES, f"<tool_call>\n{W[:-8]}", enforced=True) == ("", [("get_weather", '{"city": ')], True)
    assert whole(HERMES, f"<tool_call>\n{W[:20]}", enforced=True) == (f"<tool_call>\n{W[:20]}", [], False)


@pytest.mark.parametrize(
    ("tool_format", "begun", "first", "separator", "second"),
    [
        (MISTRAL, "[TOOL_CALLS] [", W, ", ", A),
        (HERMES, "<tool_call>[", W, ", ", A),
        (JSON, "[", W, ", ", A),
        (JSON, "", W, "\n", A),
        (LLAMA3, "", P, "; ", P),
    ],
)
@pytest.mark.parametrize("enforced", [False, True])
def test_what_is_cut_behind_a_call_of_several_is_no_content(
    tool_format: ToolFormat, begun: str, first: str, separator: str, second: str, enforced: bool
) -> None:
    if not begun and not enforced:
        return  # text may follow: nobody knows that it is a call
    for cut in range(len(separator) + len(second)):
        text = begun + first + (separator + second)[:cut]
        for pieces in ([text], list(text)):
            content, calls, unfinished = parse(tool_format, pieces, enforced=enforced)
            assert content == ""
            assert calls[0] == BERN
            assert unfinished == (len(calls) > 1)
            assert len(calls) == 1 or (enforced and second.find("{", 1) < cut - len(separator))


def test_what_is_broken_behind_a_call_of_a_list_stays_content() -> None:
    for rest in (", oops", ", {oops", "; ", f", {A[:16]}oops"):
        assert whole(MISTRAL, f"[TOOL_CALLS] [{W}{rest}") == (rest, [BERN], False)


def test_a_list_that_the_grammar_does_not_write_is_held_back() -> None:
    text = f"[{W[:-1]}, oops"
    assert whole(JSON, text, enforced=True) == (text, [], False)
    assert whole(MISTRAL, f"[TOOL_CALLS][{W[:-1]}", enforced=True) == ("", [BERN], True)


def test_a_reordered_call_is_no_call_that_a_grammar_began() -> None:
    text = '{"arguments": {"a": 1}, "name": "add", oops'
    for enforced in (False, True):
        assert whole(JSON, text, enforced=enforced) == (text, [], False)


@pytest.mark.parametrize("pieces", [["[TOOL_CALLS]no[ARGS]call"], list("[TOOL_CALLS]no[ARGS]call")])
def test_special_tokens_are_never_content(pieces: list[str]) -> None:
    hidden = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert parse(MISTRAL_ARGS, ["a[CALL_ID]b ", *pieces], hidden=hidden) == ("ab nocall", [], False)
    broken = '[TOOL_CALLS]add[ARGS]{"a":[ARGS]}'
    assert parse(MISTRAL_ARGS, list(broken), hidden=hidden) == ('add{"a":}', [], False)


def test_white_space_is_held_back_up_to_a_bound() -> None:
    parser = ToolParser(HERMES, NAMES)
    given = [parser.push("\n") for _ in range(3 * MAX_SPACE)]
    assert sum(map(len, given)) == 2 * MAX_SPACE
    assert parser.finish() == [Content("\n" * MAX_SPACE)]


def test_ids_are_distinct_and_of_the_form_that_each_template_takes() -> None:
    for tool_format, form in ((HERMES, r"call_"), (MISTRAL, "")):
        ids = {tool_format.new_id() for _ in range(50)}
        assert len(ids) == 50
        assert all(i.startswith(form) for i in ids)
    assert all(len(MISTRAL.new_id()) == 9 and MISTRAL.new_id().isalnum() for _ in range(20))


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[",
    "]",
    ", ",
    "; ",
    "{",
    "}",
    '"',
    "\n",
    "  ",
    " " * (MAX_SPACE + 3),
    "word",
    "é😀",
    "\\u00e9",
    W,
    P,
    A,
    W[:24],
    W[24:],
    "add",
    '{"a": 1}',
    '{"name": "add", "arguments": "{\\"x\\": 1}"}',
    '{"name": "add"}',
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)


@st.composite
def cut(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    ends = [0, *borders, len(text)]
    return text, [text[start:end] for start, end in itertools.pairwise(ends)]


OPTIONS = st.fixed_dictionaries({"parallel": st.booleans(), "enforced": st.booleans()})


@given(cut(), st.sampled_from(FORMATS), OPTIONS, st.booleans())
def test_the_joined_deltas_are_the_same_however_the_text_is_cut(
    texts: tuple[str, list[str]], tool_format: ToolFormat, options: dict[str, bool], hide: bool
) -> None:
    text, pieces = texts
    hidden = tool_format.markers if hide else ()
    assert parse(tool_format, pieces, hidden=hidden, **options) == whole(tool_format, text, hidden=hidden, **options)


@given(TEXTS, st.sampled_from(FORMATS), OPTIONS)
def test_nothing_is_lost(text: str, tool_format: ToolFormat, options: dict[str, bool]) -> None:
    content, calls, _ = whole(tool_format, text, **options)
    if not calls:
        assert content == text
    rest = iter(text)
    assert all(char in rest for char in content), "content is part of the text, in order"
    for _, arguments in calls:
        assert arguments == "{}" or json.dumps(arguments)[1:-1] in text or arguments in text


@given(TEXTS, st.sampled_from(FORMATS))
def test_every_finished_call_is_a_known_name_and_a_json_object(text: str, tool_format: ToolFormat) -> None:
    _, calls, unfinished = whole(tool_format, text)
    assert not unfinished
    for name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)


def test_each_character_is_read_as_json_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '<tool_call>{"a' * 300 + "\n<tool_call>" + W[:-1] + "x" + '<tool_call>{"name": {' * 300
    read = 0
    feed = ObjectScanner.feed

    def counting(scanner: ObjectScanner, text: str, start: int = 0) -> tuple[int, list[Event]]:
        nonlocal read
        end, events = feed(scanner, text, start)
        read += end - start
        return end, events

    monkeypatch.setattr(ObjectScanner, "feed", counting)
    for pieces in ([text], list(text)):
        read = 0
        assert parse(HERMES, pieces) == (text, [], False)
        assert 0 < read <= len(text)
