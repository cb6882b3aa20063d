"""The grammar that holds an answer to its tool calls, in llguidance's dialect of lark.

What it lets begin as a call is what :mod:`server.tools.parser` takes for one, and nothing that it has begun can end as
no call, except that the text is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.tools.formats import ToolFormat
from server.tools.schema import FunctionTool
from specdec.grammar.text import lark, literal

# Written as json.dumps does, which templates use: what a model saw in training, and no white space without end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SPACE = r"[ \t\n\r]*"
# A call without an opening is plain from here on. As the parser sees it (call.CallReader.begun).
_BARE_HEAD = _SPACE.join(["", r"\{", '"name"', ":", '"%s"', ",", '"(arguments|parameters)"', ":"])
_TERMINALS = r"""
TEXT: /(.|\n)+/
BLANK: /[ \t\n\r]+/
FIRST: /[ \t\n\r]*[^ \t\n\r](.|\n)*/
"""


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """The added tokens of a vocabulary, as far as calls are concerned."""

    spellings: Mapping[int, str]  # of all
    special: frozenset[int] = frozenset()  # those that skip_special_tokens leaves out of a text
    ends: frozenset[int] = frozenset()  # end-of-text tokens

    def id_of(self, spelling: str) -> int | None:
        """The id of the token that is written so; None if there is none."""
        return next((i for i, text in self.spellings.items() if text == spelling), None)


def required_calls(
    tool_format: ToolFormat, tools: Sequence[FunctionTool], tokens: AddedTokens, *, parallel: bool
) -> str:
    """The whole answer is one call of one of these tools, or with ``parallel`` one or more."""
    rules = _Rules(tool_format, tools, tokens, parallel)
    return rules.grammar(["call more" if tool_format.bare else f"{rules.opening} body more"])


def calls_or_answer(
    tool_format: ToolFormat, tools: Sequence[FunctionTool], tokens: AddedTokens, schema: object, *, parallel: bool
) -> str:
    """The whole answer is a JSON value that ``schema`` allows, or calls. The format must have an opening."""
    rules = _Rules(tool_format, tools, tokens, parallel)
    rules.add("answer", f"%json {json.dumps(schema, ensure_ascii=False)}")
    return rules.grammar(["answer", f"{rules.opening} body more"])


def optional_calls(
    tool_format: ToolFormat, tools: Sequence[FunctionTool], tokens: AddedTokens, *, parallel: bool
) -> str:
    """The answer is free text, and calls as the format has them, from their opening on.

    A text may also begin with a call that has no opening; from where that is plain it has to go on as one.
    """
    rules = _Rules(tool_format, tools, tokens, parallel)
    return rules.grammar(rules.bare_starts() if tool_format.bare else rules.open_starts())


class _Rules:
    """Rules by their names: ``call``, ``body`` (what follows an opening), ``more`` (what follows a body)."""

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[FunctionTool], tokens: AddedTokens, parallel: bool
    ) -> None:
        self._format = tool_format
        self._tools = tools
        self._tokens = tokens
        self._parallel = parallel
        self.opening = "" if tool_format.opening is None else self._marker(tool_format.opening)
        self._rules = {"call": " | ".join(f"call{i}" for i in range(len(tools)))}
        for i, tool in enumerate(tools):
            self._rules[f"call{i}"] = self._call(tool, i)
            schema = {**tool.parameters, "x-guidance": {**_LAYOUT, "lenient": not tool.strict}}
            self._rules[f"arguments{i}"] = f"%json {json.dumps(schema, ensure_ascii=False)}"
        self._rules["body"] = self._body()
        self._rules["more"] = self._more()

    def add(self, name: str, rule: str) -> None:
        self._rules[name] = rule

    def grammar(self, starts: Sequence[str]) -> str:
        rules = {"start": " | ".join(starts), **self._rules}
        return lark("\n".join(f"{name}: {rule}" for name, rule in rules.items()) + _TERMINALS)

    def open_starts(self) -> list[str]:
        """Calls behind openings, in free text."""
        quiet = self._choice(self._others())
        before = f"(TEXT? {quiet})*" if quiet else ""
        opened = self._opened(f"{before} TEXT?", before)
        rest = f"{before} TEXT?"
        if self._parallel and self._format.closing is not None:
            return [f"({opened} body)* {rest}"]  # text may go on behind a call
        return [rest, f"{opened} body more"]

    def bare_starts(self) -> list[str]:
        """Free text, in which calls have openings if the format has any; or calls from the start.

        Free text begins with what is seen in it: the parser looks for the start of the text that is seen.
        """
        others = self._others()
        quiet = self._choice(others)
        seen = self._choice([i for i in others if i not in self._tokens.special])
        before = f"(TEXT? {quiet})*" if quiet else ""
        free = f"(FIRST {f'| BLANK? {seen}' if seen else ''}) {before} TEXT?"
        starts = ["BLANK?", free, *(f"bare{i} more" for i in range(len(self._tools)))]
        for i, tool in enumerate(self._tools):
            self._rules[f"head{i}[lazy]"] = f"/{_BARE_HEAD % tool.name}/"
            self._rules[f"bare{i}"] = f'head{i} " " arguments{i} "}}"'
        if self.opening:
            begun = f"(FIRST {quiet} {f'| BLANK? {seen}' if seen else ''}) {before}" if quiet else ""
            starts.append(f"{self._opened(f'(BLANK | {free})?', f'({begun})?' if begun else '')} body more")
        return starts

    def _opened(self, any_text: str, closed_text: str) -> str:
        """An opening in free text, as a token and spelled out. ``closed_text``: free text that more text may follow."""
        marker = self._format.opening
        assert marker is not None
        self._rules["spelled[lazy]"] = f"/(.|\\n)*/ {literal(marker)}"
        if self._tokens.id_of(marker) is None:
            return f"{closed_text} spelled"
        return f"({any_text} {self.opening} | {closed_text} spelled)"

    def _call(self, tool: FunctionTool, i: int) -> str:
        if self._format.named and not self._format.prefer_list:
            return f"{literal(tool.name)} {self._marker(self._format.inner[-1])} arguments{i}"
        head = f'{{"name": "{tool.name}", "{self._format.arguments_key}": '
        return f'{literal(head)} arguments{i} "}}"'

    def _body(self) -> str:
        if self._format.prefer_list:
            return '" "? "[" call (", " call)* "]"' if self._parallel else '" "? "[" call "]"'
        space = literal(self._format.space) if self._format.space else ""
        closing = "" if self._format.closing is None else self._marker(self._format.closing)
        return f"{space} call {space} {closing}"

    def _more(self) -> str:
        if not self._parallel or self._format.prefer_list:
            return '""'
        if self._format.sequence:
            return f"({literal(self._format.separator)} call)*"
        return f"({literal(self._format.separator) if self._format.separator else ''} {self.opening} body)*"

    def _marker(self, spelling: str) -> str:
        token_id = self._tokens.id_of(spelling)
        return literal(spelling) if token_id is None else f"<[{token_id}]>"

    def _others(self) -> list[int]:
        """Added tokens that free text may hold: they are no text to a grammar."""
        opening = None if self._format.opening is None else self._tokens.id_of(self._format.opening)
        return sorted(i for i in self._tokens.spellings if i != opening and i not in self._tokens.ends)

    @staticmethod
    def _choice(ids: Sequence[int]) -> str:
        return f"<[{','.join(map(str, ids))}]>" if ids else ""
