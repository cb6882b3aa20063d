"""Tiny models that know tools, and what tests of tool calls share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from model.tokenizer import Tokenizer as ModelTokenizer
from server.tools.grammar import AddedTokens
from server.tools.schema import FunctionTool, check_tools
from tests.server.builders import byte_level_tokenizer, save_tiny_model

TOOL_CONTEXT = 2048
# By their format: what its template shows of the tools, and the tokens that the format has in real vocabularies.
_SHOWN = {
    "hermes": "{{ '<tools>' + (tool | tojson) + '</tools><tool_call>' }}",
    "llama3": "{{ 'parameters ' + (tool | tojson) }}",
    "mistral": "{{ '[AVAILABLE_TOOLS] ' + (tool | tojson) }}",
}
TEMPLATE = """\
{%- for tool in tools or [] %}SHOWN{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' + call.id + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
NO_TOOLS_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""


def tool_tokenizer() -> ModelTokenizer:
    """Byte-level, with every format's markers as added tokens: Hermes' are not special, the others are."""
    hf = byte_level_tokenizer()._hf
    hf.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>", "<think>", "plain")])
    special = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"]
    hf.add_tokens([AddedToken(text, special=True) for text in special], special_tokens=True)
    return ModelTokenizer(hf)


def added_tokens(tokenizer: ModelTokenizer) -> AddedTokens:
    eos = tokenizer.eos_token_id
    assert eos is not None
    return AddedTokens(tokenizer.added_tokens, tokenizer.special_token_ids, frozenset({eos}))


def save_tool_model(folder: Path, tool_format: str | None) -> Path:
    """``None``: its template knows no tools."""
    save_tiny_model(folder, tokenizer=tool_tokenizer(), context=TOOL_CONTEXT)
    template = NO_TOOLS_TEMPLATE if tool_format is None else TEMPLATE.replace("SHOWN", _SHOWN[tool_format])
    (folder / "chat_template.jinja").write_text(template)
    return folder


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


WEATHER = function(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    description="The weather in a city",
)
ADD = function(
    "add",
    {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 99},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    strict=True,
)
NOW = function("now")
TOOLS = [WEATHER, ADD, NOW]


def functions(tools: list[dict[str, Any]]) -> tuple[FunctionTool, ...]:
    return check_tools(tools)


def arguments_are_valid(name: str, arguments: str) -> bool:
    """By hand, for the functions above: no validator shares a mistake with the grammar's compiler."""
    value: dict[str, Any] = json.loads(arguments)
    match name:
        case "get_weather":
            return (
                set(value) == {"city", "unit"}
                and isinstance(value["city"], str)
                and len(value["city"]) <= 6
                and value["unit"] in ("celsius", "fahrenheit")
            )
        case "add":
            numbers = value.get("list", [])
            return (
                set(value) <= {"a", "list"}
                and type(value["a"]) is int
                and 0 <= value["a"] <= 99
                and len(numbers) <= 3
                and all(isinstance(item, bool) for item in numbers)
            )
        case "now":
            return not value
    return False
