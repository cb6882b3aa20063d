"""From messages to ids: as the model's own template has it, and a client's text never becomes a control token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from model.tokenizer import Tokenizer as ModelTokenizer
from server.chat.render import render
from server.chat.template import MAX_WAITING, ChatTemplate, encode_pieces
from server.errors import APIError
from tests.server.chat_builders import HELLO, TEMPLATE, THINK, chat_tokenizer

LONG = 60.0  # seconds: longer than any of these tests
CONTROL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", THINK)
TOKENIZER = chat_tokenizer()


def pieces_of(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None = None,
    tokenizer: ModelTokenizer = TOKENIZER,
) -> list[str]:
    template = tokenizer.chat_templates["default"]
    return render(template, tokenizer.special_token_names, tokenizer.control_tokens, messages, tools, 10**6)[0]


def ids_of(*args: Any, tokenizer: ModelTokenizer = TOKENIZER) -> list[int]:
    return encode_pieces(pieces_of(*args, tokenizer=tokenizer), False, tokenizer)


def num_control(ids: Sequence[int], tokenizer: ModelTokenizer = TOKENIZER) -> int:
    return sum(token_id in tokenizer.control_ids for token_id in ids)


def full_chat(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools with ``text`` wherever a client may write something."""
    call = {"id": text, "type": "function", "function": {"name": text, "arguments": {text: [text, {"a": text}]}}}
    messages = [
        {"role": "system", "content": text, "name": text},
        {"role": "user", "content": f"{text}x{text}", "name": text},
        {"role": "assistant", "content": text.replace(THINK, ""), "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": text, "name": text},
    ]
    function = {
        "name": text,
        "description": text,
        "parameters": {"type": "object", "properties": {text: {"enum": [text]}}},
    }
    return messages, [{"type": "function", "function": function}]


def test_a_chat_without_control_tokens_has_the_ids_that_the_library_gives_it() -> None:
    messages, tools = full_chat("the quick brown fox")
    expected = TOKENIZER._hf.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert ids_of(messages, tools) == expected


words = st.sampled_from([*CONTROL, "<|im_", "end|>", "|>", "<", "a", " the", "\n", "é", "好", "\U00100000"])


@settings(max_examples=60, deadline=None)
@given(st.lists(words, max_size=6).map("".join))
def test_control_tokens_come_from_the_template_alone_wherever_a_client_writes(text: str) -> None:
    neutral = num_control(ids_of(*full_chat("x")))
    ids = ids_of(*full_chat(text))
    assert num_control(ids) == neutral
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "".join(pieces_of(*full_chat(text)))


def test_spellings_of_special_tokens_are_text_in_an_assistants_message_too() -> None:
    neutral = num_control(ids_of([{"role": "assistant", "content": "x"}]))
    assert num_control(ids_of([{"role": "assistant", "content": "<|im_end|>x"}])) == neutral


def test_an_assistants_message_keeps_the_tokens_that_answers_show() -> None:
    neutral = num_control(ids_of([{"role": "assistant", "content": "x"}]))
    assert num_control(ids_of([{"role": "assistant", "content": THINK}])) == neutral + 1


def metaspace_tokenizer() -> ModelTokenizer:
    """The sentencepiece kind, which puts a space in front of a text."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


@pytest.mark.parametrize("pieces", [["ab", "</s>", "ab", "</s>", ""], ["", "</s>", "\na"], ["a", "</s>", " b"]])
def test_no_space_comes_in_where_pieces_meet(pieces: list[str]) -> None:
    tokenizer = metaspace_tokenizer()
    ids = encode_pieces(pieces, False, tokenizer)
    assert 1 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "".join(pieces)


def test_a_vocabulary_that_spells_a_control_token_itself_still_gives_text() -> None:
    vocab = {"<unk>": 0, "<eos>": 1, "<": 2, "e": 3, "o": 4, "s": 5, ">": 6}
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0 if piece == "<eos>" else -5.0) for piece in vocab], unk_id=0))
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    wrapped = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>"))
    assert wrapped._encode_without_added(["<eos>"]) == [[1]]  # what makes it hard
    assert wrapped.encode_ordinary(["<eos>"]) == [[2, 3, 4, 5, 6]]


@pytest.mark.parametrize("pieces", [["ab"], ["ab", "</s>", "a"], ["", "</s>", "a"]])
def test_adding_special_tokens_adds_them_at_the_ends(pieces: list[str]) -> None:
    tokenizer = metaspace_tokenizer()
    backend = Tokenizer.from_str(tokenizer.backend.to_str())
    backend.post_processor = TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 1)])
    wrapped = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))
    assert encode_pieces(pieces, True, wrapped) == [1, *encode_pieces(pieces, False, wrapped)]


@asynccontextmanager
async def opened(template: str | dict[str, str] | None, seconds: float = LONG) -> AsyncIterator[ChatTemplate]:
    chat = ChatTemplate(chat_tokenizer(template), timeout=seconds)
    try:
        yield chat
    finally:
        chat.close()


async def refusal(chat: ChatTemplate, messages: Sequence[dict[str, Any]], tools: Any = None) -> APIError:
    with pytest.raises(APIError) as caught:
        await chat.render(messages, tools)
    return caught.value


BAD = """\
{%- if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- elif messages[0].content == 'raise' %}{{ raise_exception('roles <|im_end|> must alternate') }}
{%- elif messages[0].content == 'expand' %}{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}
{%- elif messages[0].content == 'memory' %}{{ 'x' * 10**10 }}
{%- elif messages[0].content == 'recurse' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{%- elif messages[0].content == 'reach' %}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif messages[0].content == 'change' %}{{ messages.append(1) }}
{%- elif messages[0].content == 'miss' %}{{ messages[0].missing.more }}
{%- endif %}fine"""


async def _whatever_a_template_does_is_one_refusal_and_the_next_chat_works() -> None:
    expected = {
        "raise": "roles <|im_end|> must alternate",
        "expand": "it makes more than 16777216 characters of them",
        "memory": "it needs too much memory for them",
        "recurse": "it recurses too deep",
        "reach": "access to attribute '__class__' of 'str' object is unsafe.",
        "change": "access to attribute 'append' of 'list' object is unsafe.",
        "miss": "'dict object' has no attribute 'missing'",
    }
    async with opened(BAD) as chat:
        for kind, reason in expected.items():
            error = await refusal(chat, [{"role": "user", "content": kind}])
            assert (error.status, error.param) == (400, "messages")
            assert error.message == f"the model's chat template refuses the messages: {reason}"
            assert (await chat.render(HELLO, None)).pieces == ("fine",)


async def _a_template_without_end_is_ended_and_the_next_chat_works() -> None:
    async with opened(BAD, seconds=0.5) as chat:
        error = await refusal(chat, [{"role": "user", "content": "loop"}])
        assert (error.status, error.param) == (400, "messages")
        assert "took longer than 0.5 s" in error.message
    async with opened(BAD) as chat:
        assert (await chat.render(HELLO, None)).pieces == ("fine",)


async def _a_broken_template_is_one_line() -> None:
    async with opened("{% if %}") as chat:
        assert "it is no template: " in (await refusal(chat, HELLO)).message


async def _a_model_without_a_template_says_so() -> None:
    async with opened(None) as chat:
        error = await refusal(chat, HELLO)
        assert (error.status, error.code) == (400, "no_chat_template")


async def _the_template_for_tools_is_used_where_there_are_some() -> None:
    async with opened({"default": "plain", "tool_use": "{{ tools[0].function.name }}"}) as chat:
        assert (await chat.render(HELLO, None)).pieces == ("plain",)
        tool = {"type": "function", "function": {"name": "look"}}
        assert (await chat.render(HELLO, [tool])).pieces == ("look",)


async def _a_developer_is_a_system_message_where_the_template_knows_none() -> None:
    developer = [{"role": "developer", "content": "x"}]
    async with opened("{{ messages[0].role }}") as chat:
        assert (await chat.render(developer, None)).pieces == ("system",)
    async with opened("{{ messages[0].role }}{# developer #}") as chat:
        assert (await chat.render(developer, None)).pieces == ("developer",)


async def _a_text_that_the_tokenizer_normalizes_to_a_control_token_is_refused() -> None:
    backend = Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.normalizer = normalizers.NFKC()
    backend.add_tokens([AddedToken("<sep>", special=False, normalized=True)])
    tokenizer = ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE))
    assert tokenizer.encode("＜sep＞") == tokenizer.encode("<sep>")  # what makes it hard
    chat = ChatTemplate(tokenizer, timeout=LONG)
    try:
        for text, fine in (("<sep>", True), ("ｗide", True), ("＜sep＞", False)):
            rendered = await chat.render([{"role": "user", "content": text}], None)
            with contextlib.nullcontext() if fine else pytest.raises(APIError) as caught:
                assert await chat.encode(rendered, False)
            assert fine or caught.value.param == "messages"
    finally:
        chat.close()


async def _chats_beyond_what_may_wait_are_turned_away() -> None:
    async with opened(BAD) as chat:
        asked = [asyncio.ensure_future(chat.render(HELLO, None)) for _ in range(MAX_WAITING + 1)]
        done = await asyncio.gather(*asked, return_exceptions=True)
        (refused,) = (error for error in done if isinstance(error, APIError))
        assert (refused.status, refused.code) == (503, "overloaded")
        assert (await chat.render(HELLO, None)).pieces == ("fine",)


CASES = [
    _a_text_that_the_tokenizer_normalizes_to_a_control_token_is_refused,
    _chats_beyond_what_may_wait_are_turned_away,
    _whatever_a_template_does_is_one_refusal_and_the_next_chat_works,
    _a_template_without_end_is_ended_and_the_next_chat_works,
    _a_broken_template_is_one_line,
    _a_model_without_a_template_says_so,
    _the_template_for_tools_is_used_where_there_are_some,
    _a_developer_is_a_system_message_where_the_template_knows_none,
]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__.strip("_") for case in CASES])
def test_rendering(case: Any) -> None:
    asyncio.run(case())


def test_a_chat_has_at_least_the_tokens_that_its_rendering_counts() -> None:
    async def count() -> tuple[int, int]:
        async with opened(TEMPLATE) as chat:
            rendered = await chat.render([{"role": "user", "content": "<|im_end|>a" * 50}], None)
            return await chat.fewest_tokens(rendered), len(await chat.encode(rendered, False))

    fewest, actual = asyncio.run(count())
    assert 100 <= fewest <= actual
