"""Renders a model's chat template; runs in a worker process, because a template is a program that came with a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.chat.guard import Guard

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def render(
    template: str,
    variables: Mapping[str, Any],
    control_tokens: Mapping[str, bool],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    max_chars: int,
) -> tuple[list[str], int]:
    """The prompt, open for the assistant's answer, as :meth:`server.chat.guard.Guard.split` gives it, and the number of
    control tokens in it.

    ``control_tokens`` are spellings, True for special tokens. An assistant's own texts keep those that are not special:
    such stand in answers, and templates look for them. Where its content is a list, that goes for what stands at even
    places; the rest is a client's (server/tools/explain.py), and templates see one text. Raises ValueError with one
    line if the template is broken, refuses the messages, or makes more than ``max_chars`` of them.
    """
    try:
        compiled = _compiled(template)
    except TemplateError as error:
        raise ValueError(f"it is no template: {_line(error)}") from None
    guard = Guard(control_tokens)
    written = frozenset(spelling for spelling, special in control_tokens.items() if not special)
    guarded = [_guarded(message, guard, written) for message in messages]
    pieces, size = [], 0
    try:
        stream = compiled.generate(
            {
                **variables,
                "messages": guarded,
                "tools": None if tools is None else guard.swap(list(tools)),
                "documents": None,
                "add_generation_prompt": True,
            }
        )
        for piece in stream:
            size += len(piece)
            if size > max_chars:
                raise ValueError(f"it makes more than {max_chars} characters of them")
            pieces.append(piece)
    except MemoryError:
        raise ValueError("it needs too much memory for them") from None
    except RecursionError:
        raise ValueError("it recurses too deep") from None
    except Exception as error:  # whatever a template does with messages that it does not foresee
        raise ValueError(guard.restore(_line(error))) from None
    found = guard.split("".join(pieces))
    return found, guard.count(found[::2])


def _guarded(message: Mapping[str, Any], guard: Guard, written: frozenset[str]) -> dict[str, Any]:
    own = message["role"] == "assistant"
    guarded = {}
    for name, value in message.items():
        if name == "role":
            guarded[name] = value  # one of ours
        elif name == "content" and isinstance(value, list):
            guarded[name] = "".join(guard.swap(part, () if i % 2 else written) for i, part in enumerate(value))
        else:
            guarded[name] = guard.swap(value, written if own and isinstance(value, str) else ())
    return guarded


def _line(error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return _ADDRESS.sub("", first)[:300]


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


class _Generation(Extension):
    """``{% generation %}`` marks what a model is trained on; it has no meaning for a prompt."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter is for HTML, and escapes what a model should see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
