"""The values that fields of a request body take: each checked in full here, bounded, and turned into a tuple.

Each check raises ValueError with the rest of a sentence that begins with the field's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from server.errors import shorten

MAX_LOGIT_BIAS = 300
MAX_TOKEN_IDS = 4096  # in stop_token_ids
MAX_STRING = 4096  # in stop and the inert strings
MAX_BAD_WORDS = 256  # each is looked for at every position
MAX_BAD_WORD = 256  # characters
MAX_PARTS = 1024  # of a prediction

Prompt = str | list[int]  # text or token ids


def _is_id(value: object) -> bool:
    return type(value) is int


def _check_prompt(value: object) -> object:
    """One of the four forms, never empty; becomes a tuple of prompts. The range of ids is checked later."""
    if isinstance(value, str):
        if not value:
            raise ValueError("must not be empty")
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("must not be an empty list")
    if all(map(_is_id, value)):
        return (value,)
    for i, item in enumerate(value):
        if _is_id(value[0]) and _is_id(item):
            continue
        if not isinstance(item, type(value[0])) or not isinstance(item, (str, list)):
            raise ValueError(
                f"must hold only strings, only token ids or only lists of token ids; item {i} is {shorten(item)}"
            )
        if not item:
            raise ValueError(f"must not hold an empty prompt; item {i} is empty")
        if isinstance(item, list) and not all(map(_is_id, item)):
            wrong = next(token for token in item if not _is_id(token))
            raise ValueError(f"must hold token ids; item {i} holds {shorten(wrong)}")
    return tuple(value)


def _check_stop(value: object) -> object:
    return _check_strings(value, MAX_STRING)


def _check_bad_words(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_BAD_WORDS:
        raise ValueError(f"holds {len(value)} strings; at most {MAX_BAD_WORDS} are allowed")
    return _check_strings(value, MAX_BAD_WORD)


def _check_strings(value: object, longest: int) -> object:
    """A string or a list of strings, none empty; becomes a tuple."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise ValueError("must be a string or a list of strings")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"must hold strings; it holds {shorten(item)}")
        if not item:
            raise ValueError("must not hold an empty string")
        if len(item) > longest:
            raise ValueError(f"holds a string of {len(item)} characters; at most {longest} are allowed")
    return tuple(items)


def _check_ids(value: object) -> object:
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids")
    for item in value:
        if not _is_id(item):
            raise ValueError(f"must hold token ids; it holds {shorten(item)}")
    return tuple(value)


def _check_stop_ids(value: object) -> object:
    if isinstance(value, list) and len(value) > MAX_TOKEN_IDS:
        raise ValueError(f"holds {len(value)} ids; at most {MAX_TOKEN_IDS} are allowed")
    return _check_ids(value)


def _check_logit_bias(value: object) -> object:
    """An object from token id (JSON writes it as a string) to a number; becomes sorted pairs."""
    if not isinstance(value, dict):
        raise ValueError("must be an object from token id to a number")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    bias: dict[int, float] = {}
    for name, number in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise ValueError(f"has the key {shorten(name)}, which is not a token id")
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not -100 <= number <= 100:
            raise ValueError(f"has the value {shorten(number)} for token {name}; it must be a number from -100 to 100")
        if int(name) in bias:
            raise ValueError(f"names token {int(name)} twice")
        bias[int(name)] = float(number)
    return tuple(sorted(bias.items()))


def check_content(value: object, separator: str) -> str:
    """A text, or a list of text parts as OpenAI's clients send them; becomes one text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if not value:
        raise ValueError("must not be an empty list")
    if len(value) > MAX_PARTS:
        raise ValueError(f"holds {len(value)} parts; at most {MAX_PARTS} are allowed")
    texts: list[str] = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or set(part) != {"type", "text"}:
            raise ValueError(f'must hold objects of "type" and "text"; part {i} is {_members(part)}')
        if part["type"] != "text" or not isinstance(part["text"], str):
            wrong = "type" if part["type"] != "text" else "text"
            raise ValueError(f"must hold text parts; part {i} has the {wrong} {shorten(part[wrong])}")
        texts.append(part["text"])
    return separator.join(texts)


def _check_predicted(value: object) -> str:
    return check_content(value, "")


def _members(value: object) -> str:
    if not isinstance(value, dict):
        return shorten(value)
    return f"an object of {', '.join(shorten(name) for name in list(value)[:4]) or 'nothing'}"


def closed_object(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """JSON schema of an object with these members and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _strings(longest: int, most: int | None = None) -> dict[str, Any]:
    """JSON schema of a string or a list of strings."""
    string = {"type": "string", "minLength": 1, "maxLength": longest}
    return {"anyOf": [string, {"type": "array", "items": string} | ({} if most is None else {"maxItems": most})]}


# Plain validators: what is checked here in full, pydantic need not go through again, holding up all other threads.
ID = {"type": "integer", "minimum": 0}
_ID_LIST = {"type": "array", "items": ID}
_TEXT_PROMPT = {"type": "string", "minLength": 1}
_ID_PROMPT = {**_ID_LIST, "minItems": 1}
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_PROMPT,
                {"type": "array", "items": _TEXT_PROMPT, "minItems": 1},
                _ID_PROMPT,
                {"type": "array", "items": _ID_PROMPT, "minItems": 1},
            ]
        }
    ),
]
Bias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
Stop = Annotated[tuple[str, ...], PlainValidator(_check_stop), WithJsonSchema(_strings(MAX_STRING))]
BadWords = Annotated[
    tuple[str, ...], PlainValidator(_check_bad_words), WithJsonSchema(_strings(MAX_BAD_WORD, MAX_BAD_WORDS))
]
Ids = Annotated[tuple[int, ...], PlainValidator(_check_ids), WithJsonSchema(_ID_LIST)]
StopIds = Annotated[
    tuple[int, ...], PlainValidator(_check_stop_ids), WithJsonSchema({**_ID_LIST, "maxItems": MAX_TOKEN_IDS})
]
_PART = closed_object({"type": {"const": "text"}, "text": {"type": "string"}}, ("type", "text"))
CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1, "maxItems": MAX_PARTS}]
}
Content = Annotated[
    str,
    PlainValidator(_check_predicted),
    WithJsonSchema(CONTENT_SCHEMA),
]
Inert = Annotated[str, Field(max_length=MAX_STRING)]
