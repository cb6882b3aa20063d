"""The messages of a chat: checked in full, bounded, and brought into the one form that templates are written for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from server.body import parse_json_object
from server.errors import APIError, bad_request, shorten
from server.fields import CONTENT_SCHEMA, check_content

Message = dict[str, Any]  # role, content (a text), and what else the role has; never changed

MAX_MESSAGES = 4096
MAX_CALLS = 128  # in one message
MAX_NAME = 256  # characters of a name or an id
MAX_SHOWN = 4  # names in an error

# What a message of each role may have besides its role. Null stands for absent, as clients send back what they got.
_MEMBERS = {
    "system": {"content", "name"},
    "developer": {"content", "name"},
    "user": {"content", "name"},
    "assistant": {"content", "name", "tool_calls", "reasoning_content"},
    "tool": {"content", "name", "tool_call_id"},
}
PART_SEPARATOR = "\n"  # between text parts, which templates for texts know nothing of


def check_messages(value: object) -> tuple[Message, ...]:
    """Raises APIError 400 whose ``param`` says where, as in ``messages[2].content``."""
    if not isinstance(value, list):
        raise bad_request(f"messages must be a list; it is {shorten(value)}", "messages")
    if not value:
        raise bad_request("messages must not be empty", "messages")
    if len(value) > MAX_MESSAGES:
        raise bad_request(f"messages holds {len(value)} messages; at most {MAX_MESSAGES} are allowed", "messages")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(value))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object; it is {shorten(value)}", where)
    role = value.get("role")
    if role is None:
        raise bad_request(f"{where}.role is required", f"{where}.role", "missing_required_parameter")
    if not isinstance(role, str) or role not in _MEMBERS:
        raise bad_request(f"{where}.role must be one of {', '.join(_MEMBERS)}; it is {shorten(role)}", f"{where}.role")
    given = _members(value, _MEMBERS[role] | {"role"}, where, f"a message of the role {role}")
    message: Message = {"role": role, "content": ""}
    calls = given.get("tool_calls")
    if "content" in given:
        message["content"] = _content(given["content"], f"{where}.content")
    elif not calls:
        raise bad_request(f"{where}.content is required", f"{where}.content", "missing_required_parameter")
    for name in ("name", "tool_call_id"):
        if name in given:
            message[name] = check_text(given[name], f"{where}.{name}", MAX_NAME)
    if role == "tool" and "tool_call_id" not in message:
        raise bad_request(f"{where}.tool_call_id is required", f"{where}.tool_call_id", "missing_required_parameter")
    if "reasoning_content" in given:
        message["reasoning_content"] = check_text(given["reasoning_content"], f"{where}.reasoning_content")
    if calls is not None:
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    return message


def _members(value: Mapping[str, Any], known: set[str], where: str, what: str) -> dict[str, Any]:
    """The members that are not null. Raises APIError for an unknown one, but not for one that says nothing."""
    given = {name: member for name, member in value.items() if member is not None}
    for name in given:
        if name not in known and not (name == "annotations" and given[name] == []):
            raise bad_request(
                f"{where}.{name[:MAX_NAME]} is not supported: {what} has {', '.join(sorted(known))}",
                f"{where}.{name[:64]}",
                "unknown_parameter",
            )
    return given


def _content(value: object, where: str) -> str:
    try:
        return check_content(value, PART_SEPARATOR)
    except ValueError as error:
        raise bad_request(f"{where} {error}", where) from None


def check_text(value: object, where: str, longest: int | None = None) -> str:
    """A text that is not empty if it is bounded. Raises APIError 400."""
    if not isinstance(value, str):
        raise bad_request(f"{where} must be a string; it is {shorten(value)}", where)
    if longest is not None and not 1 <= len(value) <= longest:
        raise bad_request(f"{where} must have 1 to {longest} characters; it has {len(value)}", where)
    return value


def texts_in(value: object) -> Iterator[str]:
    """All texts in messages or tools, names of members included: what a template may write out."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack += item
            stack += item.values()
        elif isinstance(item, list | tuple):
            stack += item


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise bad_request(f"{where} must be a list of tool calls, not empty", where)
    if len(value) > MAX_CALLS:
        raise bad_request(f"{where} holds {len(value)} calls; at most {MAX_CALLS} are allowed", where)
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(value)]


def _call(value: object, where: str) -> dict[str, Any]:
    """With the arguments as an object: that is what templates write out."""
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object; it is {shorten(value)}", where)
    given = _members(value, {"id", "type", "function", "index"}, where, "a tool call")  # index: from joined deltas
    for name in ("id", "function"):
        if name not in given:
            raise bad_request(f"{where}.{name} is required", f"{where}.{name}", "missing_required_parameter")
    if given.get("type", "function") != "function":
        raise bad_request(f"{where}.type must be 'function'; it is {shorten(given['type'])}", f"{where}.type")
    if not isinstance(given.get("index", 0), int):
        raise bad_request(f"{where}.index must be a number; it is {shorten(given['index'])}", f"{where}.index")
    function, inside = given["function"], f"{where}.function"
    if not isinstance(function, dict):
        raise bad_request(f"{inside} must be an object; it is {shorten(function)}", inside)
    function = _members(function, {"name", "arguments"}, inside, "a called function")
    if "name" not in function:
        raise bad_request(f"{inside}.name is required", f"{inside}.name", "missing_required_parameter")
    return {
        "id": check_text(given["id"], f"{where}.id", MAX_NAME),
        "type": "function",
        "function": {
            "name": check_text(function["name"], f"{inside}.name", MAX_NAME),
            "arguments": _arguments(function.get("arguments", ""), f"{inside}.arguments"),
        },
    }


def _arguments(value: object, where: str) -> dict[str, Any]:
    text = check_text(value, where)
    if not text.strip():
        return {}
    try:
        return parse_json_object(text.encode())
    except APIError as error:
        _, _, reason = error.message.partition("the body ")
        if reason.startswith("must be"):  # it is JSON
            raise bad_request(f"{where} must be a JSON object; it is another JSON value", where) from None
        raise bad_request(f"{where} must be a JSON object; it {reason}", where) from None


_TEXT = {"type": "string"}
_NULLABLE = {"type": ["string", "null"]}


def _schema(role: str) -> dict[str, Any]:
    members: dict[str, Any] = {
        "role": {"const": role},
        "content": CONTENT_SCHEMA,
        "name": {**_NULLABLE, "minLength": 1, "maxLength": MAX_NAME},
    }
    required = ["role", "content"]
    if role == "tool":
        members["tool_call_id"] = {**_TEXT, "minLength": 1, "maxLength": MAX_NAME}
        required.append("tool_call_id")
    if role == "assistant":
        members["content"] = {"anyOf": [*CONTENT_SCHEMA["anyOf"], {"type": "null"}]}
        members["reasoning_content"] = _NULLABLE
        members["tool_calls"] = {"type": ["array", "null"], "items": _CALL, "minItems": 1, "maxItems": MAX_CALLS}
        required = ["role"]
    return {"type": "object", "properties": members, "required": required}


_CALL = {
    "type": "object",
    "properties": {
        "id": {**_TEXT, "minLength": 1, "maxLength": MAX_NAME},
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {"name": {**_TEXT, "minLength": 1, "maxLength": MAX_NAME}, "arguments": _NULLABLE},
            "required": ["name"],
        },
    },
    "required": ["id", "function"],
}
Messages = Annotated[
    tuple[Message, ...],
    PlainValidator(check_messages),
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {"anyOf": [_schema(role) for role in _MEMBERS]},
        }
    ),
]
