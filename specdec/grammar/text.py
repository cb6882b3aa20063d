"""Grammars as text, in the form that llguidance reads: hashable, picklable, comparable."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def json_schema(schema: Mapping[str, Any] | bool) -> str:
    """A JSON value that the schema allows."""
    return _dump({"grammars": [{"json_schema": schema}]})


def regex(pattern: str) -> str:
    """The whole output matches ``pattern`` (the syntax of Rust's regex crate)."""
    return lark(f"start: TEXT\nTEXT: /{_slashed(pattern)}/")


def choice(texts: Sequence[str]) -> str:
    """One of ``texts``, exactly."""
    # One terminal: as alternatives of a rule, each would be an item of the parser.
    written = " | ".join(literal(text) for text in dict.fromkeys(texts) if text)
    starts = [*(["TEXT"] if written else []), *(['""'] if "" in texts else [])]
    return lark(f"start: {' | '.join(starts)}" + (f"\nTEXT: {written}" if written else ""))


def lark(grammar: str) -> str:
    """A grammar in llguidance's dialect of lark, with the rule ``start``."""
    return _dump({"grammars": [{"lark_grammar": grammar}]})


def unforced(grammar: str) -> str:
    """The same grammar, with masks that allow each token whose text can follow also where all of the text is forced."""
    (first,) = json.loads(grammar)["grammars"]
    text = first.get("lark_grammar") or f"start: body\nbody: %json {_dump(first['json_schema'])}"
    return lark(f'%llguidance {{"no_forcing": true}}\n{text}')


def literal(text: str) -> str:
    """``text`` as a lark grammar writes it: as JSON does, but its lexer wants DEL escaped, too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _slashed(pattern: str) -> str:
    """``pattern`` between slashes: those inside are escaped, unless they are already, and so are line breaks."""
    found, escaped = [], False
    for char in pattern:
        if char == "\n":
            found.append("n" if escaped else "\\n")
        elif char == "/" and not escaped:
            found.append("\\/")
        else:
            found.append(char)
        escaped = char == "\\" and not escaped
    return "".join(found)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
