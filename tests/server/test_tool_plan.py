"""What a model's tools come to: its format, what it is shown, and whether its answers are held to a grammar."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.chat.render import render
from server.chat.template import encode_pieces
from server.detokenize import ChoiceText, IncrementalText
from server.tools.explain import with_calls_as_text
from server.tools.formats import HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat, find_format
from server.tools.plan import ToolSupport
from server.tools.schema import ToolChoice
from tests.server.tool_builders import ADD, NO_TOOLS_TEMPLATE, NOW, TEMPLATE, added_tokens, functions, tool_tokenizer

TOKENIZER = tool_tokenizer()
TOKENS = added_tokens(TOKENIZER)
IDS = {text: token_id for token_id, text in TOKENS.spellings.items()}
QWEN = "{%- if tools %}{{- '<tools>' }}{% endif %}... return within <tool_call></tool_call> XML tags"
LLAMA = "{%- if tools is not none %}{% if builtin_tools %}{{ '<|python_tag|>' + call }}{% endif %}{% endif %}"
MISTRAL_V3 = "{{- '[AVAILABLE_TOOLS] [' }}{% for tool in tools %}{% endfor %}{{- '[TOOL_CALLS] [' }}"
MISTRAL_V11 = "{{- '[AVAILABLE_TOOLS]' + (tools | tojson) }}{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"


@pytest.mark.parametrize(
    ("chosen", "template", "found"),
    [
        ("auto", QWEN, HERMES),
        ("auto", LLAMA, LLAMA3),
        ("auto", MISTRAL_V3, MISTRAL),
        ("auto", MISTRAL_V11, MISTRAL_ARGS),
        ("auto", "{% for message in messages %}{{ message.content }}{% endfor %}", JSON),
        ("auto", None, JSON),
        ("hermes", MISTRAL_V3, HERMES),
        ("llama3", None, LLAMA3),
        ("json", QWEN, JSON),
        ("mistral", MISTRAL_V11, MISTRAL_ARGS),
        ("mistral", MISTRAL_V3, MISTRAL),
    ],
)
def test_the_template_gives_the_format_away_unless_one_is_chosen(
    chosen: str, template: str | None, found: ToolFormat
) -> None:
    assert find_format(chosen, template, TOKENS.spellings.values()) is found  # type: ignore[arg-type]


def test_without_grammars_auto_is_what_the_model_makes_of_it_and_the_rest_needs_one() -> None:
    support = ToolSupport(HERMES, TOKENS, TEMPLATE)
    plan = support.plan(functions([NOW]), None, None, grammars=False)
    assert plan is not None
    assert plan.grammar is None
    text = '<tool_call>{"name": "now", "arguments": {}'
    parser = plan.parser()
    assert parser.push(text) == []  # held back: nobody promised that it ends well
    assert [delta.text for delta in parser.finish()] == [text]  # type: ignore[union-attr]
    for tools, choice in (
        ([ADD], None),
        ([NOW], ToolChoice("required")),
        ([NOW], ToolChoice("required", ("now",), True)),
    ):
        plan = support.plan(functions(tools), choice, None, grammars=False)
        assert plan is not None
        assert plan.grammar is not None  # which the server refuses, with the reason


def test_no_tools_and_none_have_no_plan() -> None:
    support = ToolSupport(HERMES, TOKENS, TEMPLATE)
    assert support.plan(None, None, None) is None
    assert support.plan(functions([NOW]), ToolChoice("none"), None) is None


def test_the_model_is_shown_what_concerns_it() -> None:
    plan = ToolSupport(HERMES, TOKENS, TEMPLATE).plan(functions([ADD]), None, None)
    assert plan is not None
    (shown,) = plan.shown
    function = ADD["function"]
    assert shown == {"type": "function", "function": {name: function[name] for name in ("name", "parameters")}}


def test_results_of_several_calls_are_one_message_of_the_user() -> None:
    def call(call_id: str, name: str) -> dict[str, object]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": 1}}}

    told = with_calls_as_text(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Well.", "tool_calls": [call("1", "f"), call("2", "g")]},
            {"role": "tool", "content": "eins", "tool_call_id": "1"},
            {"role": "tool", "content": "zwei", "tool_call_id": "2"},
            {"role": "assistant", "content": "Done."},
        ],
        JSON,
    )
    assert told == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                "Well.\n",
                '{"name": "f", "arguments": {"a": 1}}',
                "\n",
                '{"name": "g", "arguments": {"a": 1}}',
                "",
            ],
        },
        {"role": "user", "content": "Result of f: eins\nResult of g: zwei"},
        {"role": "assistant", "content": "Done."},
    ]


SPELLINGS = ["<tool_call>", "</tool_call>", "<think>", "plain", "[TOOL_CALLS]", "[ARGS]", "<|im_end|>"]


@pytest.mark.parametrize("tool_format", [HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON])
@pytest.mark.parametrize("content", ["", "<think>"])
@given(
    text=st.lists(st.sampled_from([*SPELLINGS, "<tool", "_call>", ">", "x", " ", "\n"]), min_size=1, max_size=5).map(
        "".join
    )
)
def test_calls_as_text_make_no_tokens_of_what_a_client_writes(tool_format: ToolFormat, content: str, text: str) -> None:
    def ids(text: str) -> list[int]:
        call = {"id": "1", "type": "function", "function": {"name": text, "arguments": {text: [text, {text: text}]}}}
        messages = [{"role": "assistant", "content": content, "tool_calls": [call, call]}]
        told = with_calls_as_text(messages, tool_format)
        rendered, _ = render(NO_TOOLS_TEMPLATE, {}, TOKENIZER.control_tokens, told, None, 10**6)
        found = encode_pieces(rendered, False, TOKENIZER)
        assert TOKENIZER.decode(found, False) == "".join(rendered)
        return [i for i in found if i in TOKENIZER.control_ids]

    neutral = ids("x")
    assert ids(text) == neutral
    assert neutral.count(IDS["<think>"]) == (content == "<think>")  # an assistant's own text keeps it
    assert neutral.count(IDS["<tool_call>"]) == (2 if tool_format is HERMES else 0)  # as the model wrote it


@given(
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.sets(st.sampled_from(sorted(TOKENS.special)))
)
def test_of_the_special_tokens_only_those_to_show_are_in_the_text(ids: list[int], shown: set[int]) -> None:
    text = IncrementalText(TOKENIZER, True, frozenset(shown))
    pieces = [text.push(token_id) for token_id in ids]
    visible = [i for i in ids if i not in TOKENS.special or i in shown]
    assert "".join([*pieces, text.flush()]) == TOKENIZER.decode(visible, skip_special_tokens=False)


def test_a_stop_string_is_found_in_a_shown_token() -> None:
    marker = TOKENS.id_of("[ARGS]")
    assert marker is not None
    for shown, stopped in ((frozenset({marker}), True), (frozenset(), False)):
        choice = ChoiceText(TOKENIZER, stop=("[ARGS",), shown_special_ids=shown)
        assert choice.push([marker], is_last=True).stopped == stopped
