"""The fields of a chat request that concern tools, each checked in full and bounded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from server.errors import bad_request, shorten
from server.fields import closed_object

MAX_TOOLS = 128
MAX_DESCRIPTION = 16384  # characters
MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMAS_BYTES = 96 * 1024  # together: they are one grammar
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, underscores or dashes"


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    size: int  # its bytes as JSON
    strict: bool
    shown: Mapping[str, Any]  # to the model, in OpenAI's form


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``mode``, and the names that it is limited to; None: all."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    single: bool = False  # one named function, called once


def check_tools(value: object) -> tuple[FunctionTool, ...]:
    """Raises APIError 400 whose ``param`` says where, as in ``tools[2].function.name``."""
    if not isinstance(value, list):
        raise bad_request(f"tools must be a list; it is {shorten(value)}", "tools")
    if not 1 <= len(value) <= MAX_TOOLS:
        raise bad_request(f"tools must hold 1 to {MAX_TOOLS} tools; it holds {len(value)}", "tools")
    tools: dict[str, FunctionTool] = {}
    size = 0
    for i, item in enumerate(value):
        tool = _tool(item, f"tools[{i}]")
        if tool.name in tools:
            where = f"tools[{i}].function.name"
            raise bad_request(f"{where} is {shorten(tool.name)}, which an earlier tool has already", where)
        tools[tool.name] = tool
        size += tool.size
    if size > MAX_SCHEMAS_BYTES:
        raise bad_request(
            f"tools must hold parameters of at most {MAX_SCHEMAS_BYTES} bytes together; they have {size}", "tools"
        )
    return tuple(tools.values())


def _tool(value: object, where: str) -> FunctionTool:
    tool = _members(value, where, required=("type", "function"))
    _check_type(tool, where)
    inside = f"{where}.function"
    function = _members(tool["function"], inside, required=("name",), optional=("description", "parameters", "strict"))
    name = function["name"]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad_request(f"{inside}.name must be {_NAME_RULE}; it is {shorten(name)}", f"{inside}.name")
    description, strict = function.get("description", ""), function.get("strict", False)
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        raise bad_request(
            f"{inside}.description must be a string of at most {MAX_DESCRIPTION} characters; it is "
            f"{f'one of {len(description)}' if isinstance(description, str) else shorten(description)}",
            f"{inside}.description",
        )
    if not isinstance(strict, bool):
        raise bad_request(f"{inside}.strict must be true or false; it is {shorten(strict)}", f"{inside}.strict")
    parameters, size = _parameters(function.get("parameters"), f"{inside}.parameters")
    shown = {name: member for name, member in function.items() if name != "strict"}
    return FunctionTool(name, parameters, size, strict, {"type": "function", "function": shown})


def _parameters(value: object, where: str) -> tuple[Mapping[str, Any], int]:
    """The schema of an object, and its bytes as JSON."""
    if value is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}, 0
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be a JSON schema object; it is {shorten(value)}", where)
    if value.get("type", "object") != "object":
        raise bad_request(f"{where} must be of the type 'object'; its type is {shorten(value['type'])}", where)
    size = len(json.dumps(value, ensure_ascii=False).encode())
    if size > MAX_SCHEMA_BYTES:
        raise bad_request(f"{where} must have at most {MAX_SCHEMA_BYTES} bytes; it has {size}", where)
    return {"type": "object", **value}, size


def _members(value: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The members that are not null; an unknown one is an error."""
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object; it is {shorten(value)}", where)
    for name in value:
        if name not in required and name not in optional:
            param = f"{where}.{name[:64]}"
            raise bad_request(f"unknown parameter: {param}", param, "unknown_parameter")
    given = {name: member for name, member in value.items() if member is not None}
    for name in required:
        if name not in given:
            raise bad_request(f"{where}.{name} is required", f"{where}.{name}", "missing_required_parameter")
    return given


def _check_type(value: Mapping[str, Any], where: str) -> None:
    if value["type"] != "function":
        raise bad_request(f"{where}.type must be 'function'; it is {shorten(value['type'])}", f"{where}.type")


def _check_tool_choice(value: object) -> ToolChoice:
    if isinstance(value, dict):
        if value.get("type") == "allowed_tools":
            return _allowed(value)
        return ToolChoice("required", (_called(value, "tool_choice"),), single=True)
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
    raise bad_request(
        f"tool_choice must be 'none', 'auto', 'required' or an object that names a function; it is {shorten(value)}",
        "tool_choice",
    )


def _called(value: object, where: str) -> str:
    """The name in ``{"type": "function", "function": {"name": ...}}``."""
    choice = _members(value, where, required=("type", "function"))
    _check_type(choice, where)
    function = _members(choice["function"], f"{where}.function", required=("name",))
    if not isinstance(function["name"], str):
        where = f"{where}.function.name"
        raise bad_request(f"{where} must be a string; it is {shorten(function['name'])}", where)
    return function["name"]


def _allowed(value: object) -> ToolChoice:
    where = "tool_choice.allowed_tools"
    allowed = _members(
        _members(value, "tool_choice", ("type", "allowed_tools"))["allowed_tools"], where, ("mode", "tools")
    )
    mode, tools = allowed["mode"], allowed["tools"]
    if mode not in ("auto", "required"):
        raise bad_request(f"{where}.mode must be 'auto' or 'required'; it is {shorten(mode)}", f"{where}.mode")
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        raise bad_request(f"{where}.tools must be a list of 1 to {MAX_TOOLS} tools", f"{where}.tools")
    return ToolChoice(mode, tuple(_called(tool, f"{where}.tools[{i}]") for i, tool in enumerate(tools)))


_FUNCTION_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_NAMED = closed_object(
    {"type": {"const": "function"}, "function": closed_object({"name": _FUNCTION_NAME}, ("name",))},
    ("type", "function"),
)
_FUNCTION = closed_object(
    {
        "name": _FUNCTION_NAME,
        "description": {"anyOf": [{"type": "string", "maxLength": MAX_DESCRIPTION}, {"type": "null"}]},
        "parameters": {"anyOf": [{"type": "object", "properties": {"type": {"const": "object"}}}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    ("name",),
)
_TOOL = closed_object({"type": {"const": "function"}, "function": _FUNCTION}, ("type", "function"))
_ALLOWED_TOOLS = closed_object(
    {
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "items": _NAMED, "minItems": 1, "maxItems": MAX_TOOLS},
    },
    ("mode", "tools"),
)
_ALLOWED = closed_object(
    {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED_TOOLS}, ("type", "allowed_tools")
)
Tools = Annotated[
    tuple[FunctionTool, ...],
    PlainValidator(check_tools),
    WithJsonSchema({"type": "array", "items": _TOOL, "minItems": 1, "maxItems": MAX_TOOLS}),
]
ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(_check_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED]}),
]


def check_tool_fields(
    tools: tuple[FunctionTool, ...] | None, tool_choice: ToolChoice | None, parallel_tool_calls: bool | None
) -> None:
    """What the three say together. Raises APIError 400."""
    for name, value in (("tool_choice", tool_choice), ("parallel_tool_calls", parallel_tool_calls)):
        if tools is None and value is not None:
            raise bad_request(f"{name} is only allowed when tools are given", name)
    known = {tool.name for tool in tools or ()}
    for name in (tool_choice and tool_choice.names) or ():
        if name not in known:
            raise bad_request(f"tool_choice names the function {shorten(name)}, which is not in tools", "tool_choice")
