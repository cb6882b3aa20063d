"""What the tools of a request come to: what the model is shown, the grammar of its answer, and who reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.tools.explain import with_calls_as_text, with_tools
from server.tools.formats import ToolFormat
from server.tools.grammar import AddedTokens, calls_or_answer, optional_calls, required_calls
from server.tools.parser import ToolParser
from server.tools.schema import FunctionTool, ToolChoice

Message = Mapping[str, Any]
AUTO = ToolChoice("auto")
ONE_AT_A_TIME = "single tool-call"  # as templates refuse to show an answer of several (Llama 3's)


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Of one request that may call tools. Not of one that calls none: it has no plan, and the model sees no tools."""

    tool_format: ToolFormat
    shown: tuple[Mapping[str, Any], ...]  # to the model: all tools of the request
    names: frozenset[str]  # of those that may be called
    parallel: bool
    grammar: str | None  # None: nothing holds the model to the format
    hidden: frozenset[str]  # markers that are special tokens

    def parser(self) -> ToolParser:
        """A reader of one choice's text, in which special tokens among the format's markers are written out."""
        return ToolParser(
            self.tool_format,
            self.names,
            parallel=self.parallel,
            enforced=self.grammar is not None,
            hidden=self.hidden,
        )


class ToolSupport:
    """How this model calls tools."""

    def __init__(
        self, tool_format: ToolFormat, tokens: AddedTokens, template: str | None, template_with_tools: str | None = None
    ) -> None:
        """``template``: the source of the chat template, and of the one for requests with tools."""
        self.tool_format = tool_format
        self._tokens = tokens
        self._template = template or ""
        self._template_with_tools = template_with_tools or self._template
        self.shows_tools = "tools" in self._template_with_tools
        self._one_at_a_time = ONE_AT_A_TIME in self._template_with_tools
        markers = {tokens.id_of(marker) for marker in tool_format.markers}
        self.special_markers = frozenset(i for i in markers if i is not None) & tokens.special

    @property
    def info(self) -> dict[str, Any]:
        """For /v1/server_info."""
        return {"format": self.tool_format.name, "template_shows_tools": self.shows_tools}

    def plan(
        self,
        tools: Sequence[FunctionTool] | None,
        choice: ToolChoice | None,
        parallel: bool | None,
        *,
        answer: Mapping[str, Any] | bool | None = None,
        grammars: bool = True,
        skip_special_tokens: bool = True,
    ) -> ToolPlan | None:
        """``answer``: the JSON schema of what is no call. Raises ValueError if the format cannot tell such an answer
        from a call. ``grammars``: whether an answer can be held to one; without, ``auto`` is what the model makes of
        it.
        """
        choice = choice or AUTO
        if not tools or choice.mode == "none":
            return None
        callable_tools = [tool for tool in tools if choice.names is None or tool.name in choice.names]
        parallel = parallel is not False and not choice.single and not self._one_at_a_time
        tool_format = self.tool_format
        grammar: str | None = None
        if choice.mode == "required":
            grammar = required_calls(tool_format, callable_tools, self._tokens, parallel=parallel)
        elif answer is not None:
            if tool_format.opening is None:
                raise ValueError("this model's tool calls are JSON themselves")
            tool_format = replace(tool_format, bare=False)
            grammar = calls_or_answer(tool_format, callable_tools, self._tokens, answer, parallel=parallel)
        elif grammars or any(tool.strict for tool in callable_tools):
            grammar = optional_calls(tool_format, callable_tools, self._tokens, parallel=parallel)
        hidden = [self._tokens.spellings[i] for i in self.special_markers] if skip_special_tokens else []
        return ToolPlan(
            tool_format,
            tuple(tool.shown for tool in tools),
            frozenset(tool.name for tool in callable_tools),
            parallel,
            grammar,
            frozenset(hidden),
        )

    def told(
        self, messages: Sequence[Message], plan: ToolPlan | None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Messages and tools for the chat template. What it knows nothing of is put into words instead."""
        if "tool_calls" not in (self._template if plan is None else self._template_with_tools):
            messages = with_calls_as_text(messages, self.tool_format)
        if plan is None:
            return messages, None
        if self.shows_tools:
            return messages, plan.shown
        return with_tools(messages, plan.shown, self.tool_format), None
