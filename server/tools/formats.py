"""The ways in which models write tool calls, and how to see which one a model was trained for."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

FormatName = Literal["hermes", "llama3", "mistral", "json"]
_ALPHANUMERIC = string.ascii_letters + string.digits


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. A call is an object of ``name`` and ``arguments``, unless ``named``.

    ``opening`` announces a call anywhere in the text; without it, or with ``bare``, a call may be how the text begins.
    The grammar has calls written with ``arguments_key``, ``separator``, ``space`` and, if ``prefer_list``, in a list;
    the parser takes more.
    """

    name: FormatName
    opening: str | None
    closing: str | None = None
    bare: bool = False  # the text may begin with a call
    lists: bool = False  # a list of calls may stand for a call
    named: bool = False  # opening, name, arguments: no object around them
    sequence: bool = False  # the next call follows directly, or behind a separator
    prefer_list: bool = False
    arguments_key: Literal["arguments", "parameters"] = "arguments"
    inner: tuple[str, ...] = ()  # further markers, between name and arguments
    separator: str = ""  # between calls, as the grammar writes them
    space: str = ""  # between opening and call, and call and closing, as the grammar writes it
    new_id: Callable[[], str] = _openai_id

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be one token of the vocabulary, and that no reader of the answer should see."""
        return tuple(marker for marker in (self.opening, self.closing, *self.inner) if marker is not None)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", lists=True, separator="\n", space="\n")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", bare=True, sequence=True, separator="; ", arguments_key="parameters")
MISTRAL = ToolFormat(
    "mistral",
    "[TOOL_CALLS]",
    lists=True,
    named=True,
    prefer_list=True,
    inner=("[CALL_ID]", "[ARGS]"),
    new_id=_mistral_id,  # Mistral's templates refuse any other
)
MISTRAL_ARGS = ToolFormat(
    "mistral", "[TOOL_CALLS]", lists=True, named=True, inner=("[CALL_ID]", "[ARGS]"), new_id=_mistral_id
)
JSON = ToolFormat("json", None, bare=True, lists=True, sequence=True, separator="\n")


def find_format(
    chosen: FormatName | Literal["auto"], template: str | None, added_tokens: Collection[str]
) -> ToolFormat:
    """The format by name; with ``auto`` the one that the template, or else the vocabulary, gives away.

    ``template`` is the chat template's source, ``added_tokens`` the spellings of the tokenizer's added tokens.
    """
    template = template or ""
    mistral = MISTRAL_ARGS if "[ARGS]" in template or (not template and "[ARGS]" in added_tokens) else MISTRAL
    match chosen:
        case "hermes":
            return HERMES
        case "llama3":
            return LLAMA3
        case "mistral":
            return mistral
        case "json":
            return JSON
    if HERMES.markers[0] in template:
        return HERMES
    if "[TOOL_CALLS]" in template or "[AVAILABLE_TOOLS]" in template:
        return mistral
    if "tools" in template and ("<|python_tag|>" in template or "<|python_tag|>" in added_tokens):
        return LLAMA3
    return JSON


def takes_tools(template: str | None) -> bool:
    """Whether the template shows the tools to the model."""
    return template is not None and "tools" in template
