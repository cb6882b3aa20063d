"""What a request wants its output to be: ``response_format`` (OpenAI's) and ``structured_outputs`` (vLLM's).

Each is checked here in full and becomes an :class:`OutputFormat`; whether its grammar can be used is found out later
(server/grammars.py). Errors are ValueErrors with the rest of a sentence that begins with the field's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from server.errors import bad_request, shorten
from server.fields import closed_object
from specdec.grammar.compiler import MAX_GRAMMAR_BYTES
from specdec.grammar.text import choice, json_schema, regex

MAX_NAME = 64  # of a json_schema
MAX_CHOICES = 4096
ANY_OBJECT = {"type": "object"}
Schema = Mapping[str, Any] | bool

FORMATS = ("text", "json_object", "json_schema")
OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """``grammar`` is None for plain text. ``foreign``: it may be GBNF or EBNF, and becomes lark in the check."""

    grammar: str | None
    param: str  # the field that it came from, for messages
    foreign: bool = False
    schema: Schema | None = None  # what ``grammar`` says, if it is a JSON schema


PLAIN_TEXT = OutputFormat(None, "response_format")


def wanted_format(response_format: OutputFormat | None, structured_outputs: OutputFormat | None) -> OutputFormat | None:
    """The one of a request's two fields that holds a grammar; None for plain text. Raises APIError if both do."""
    wanted = [given for given in (response_format, structured_outputs) if given is not None and given.grammar]
    if len(wanted) > 1:
        raise bad_request("structured_outputs cannot be combined with response_format", "structured_outputs")
    return wanted[0] if wanted else None


def check_response_format(value: object) -> OutputFormat:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in FORMATS:
        raise ValueError(f'must be an object whose "type" is one of {", ".join(FORMATS)}; it is {_shown(value, kind)}')
    _check_members(value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return PLAIN_TEXT
    if kind == "json_object":
        return _json(ANY_OBJECT, "response_format")
    named = value.get("json_schema")
    if not isinstance(named, dict):
        raise ValueError(f'must have "json_schema", an object with a name and a schema; it is {shorten(named)}')
    _check_members(named, ("name", "description", "schema", "strict"))
    name = named.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise ValueError(f'must have a "name" of 1 to {MAX_NAME} characters in json_schema; it is {shorten(name)}')
    for member, wanted in (("description", str), ("strict", bool)):
        if not isinstance(named.get(member), (wanted, type(None))):
            raise ValueError(f"has the json_schema.{member} {shorten(named[member])}")
    return _json(_schema(named.get("schema"), "json_schema.schema"), "response_format")


def check_structured_outputs(value: object) -> OutputFormat:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with one of {', '.join(OUTPUTS)}; it is {shorten(value)}")
    unset = {"json_object": False}
    given = {name: member for name, member in value.items() if member is not None and member is not unset.get(name)}
    _check_members(value, OUTPUTS)
    if len(given) != 1:
        raise ValueError(f"must have exactly one of {', '.join(OUTPUTS)}; it has {' and '.join(given) or 'none'}")
    ((name, wanted),) = given.items()
    param = f"structured_outputs.{name}"
    if name == "json":
        if isinstance(wanted, str):
            wanted = _parse(wanted)
        return _json(_schema(wanted, "json"), param)
    if name == "json_object":
        if wanted is not True:
            raise ValueError(f"has the json_object {shorten(wanted)}; it must be true")
        return _json(ANY_OBJECT, param)
    if name == "choice":
        return OutputFormat(choice(_choices(wanted)), param)
    if not isinstance(wanted, str) or not 1 <= len(wanted.encode(errors="replace")) <= MAX_GRAMMAR_BYTES:
        raise ValueError(f"must have a {name} of 1 to {MAX_GRAMMAR_BYTES} bytes; it is {shorten(wanted)}")
    return OutputFormat(regex(wanted) if name == "regex" else wanted, param, foreign=name == "grammar")


def _json(schema: Schema, param: str) -> OutputFormat:
    return OutputFormat(json_schema(schema), param, schema=schema)


def _schema(value: object, name: str) -> Schema:
    if not isinstance(value, (dict, bool)):
        raise ValueError(f"must have a JSON schema in {name}; it is {shorten(value)}")
    return value


def _parse(text: str) -> object:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"has a json of {len(text)} characters; at most {MAX_GRAMMAR_BYTES} are allowed")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"has a json that is a string but no JSON: {shorten(text)}") from None


def _choices(value: object) -> list[str]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        raise ValueError(f"must have a choice of 1 to {MAX_CHOICES} strings; it is {shorten(value)}")
    wrong = next((item for item in value if not isinstance(item, str)), None)
    if wrong is not None or None in value:
        raise ValueError(f"must have strings in choice; it holds {shorten(wrong)}")
    return value


def _check_members(value: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None:
        raise ValueError(f"has the unknown member {shorten(unknown)}; known are {', '.join(known)}")


def _shown(value: object, kind: object) -> str:
    return f"of the type {shorten(kind)}" if isinstance(value, dict) else shorten(value)


_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}]}
_ONE = {
    "json": {"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]},
    "json_object": {"const": True},
    "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
    "regex": {"type": "string", "minLength": 1},
    "grammar": {"type": "string", "minLength": 1},
}
_UNSET: dict[str, Any] = {**{name: {"type": "null"} for name in _ONE}, "json_object": {"enum": [False, None]}}
_NAMED_SCHEMA = closed_object(
    {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME},
        "description": {"type": ["string", "null"]},
        "schema": _SCHEMA,
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    ("name", "schema"),
)
ResponseFormat = Annotated[
    OutputFormat,
    PlainValidator(check_response_format),
    WithJsonSchema(
        {
            "anyOf": [
                closed_object({"type": {"enum": ["text", "json_object"]}}, ("type",)),
                closed_object(
                    {"type": {"const": "json_schema"}, "json_schema": _NAMED_SCHEMA}, ("type", "json_schema")
                ),
            ]
        }
    ),
]
StructuredOutputs = Annotated[
    OutputFormat,
    PlainValidator(check_structured_outputs),
    WithJsonSchema({"anyOf": [closed_object({**_UNSET, name: one}, (name,)) for name, one in _ONE.items()]}),
]
