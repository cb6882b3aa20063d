"""Fields about tools that are wrong are refused by their names."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.tool_builders import ADD, NOW, function
from tests.server.tools.asking import post

BIG = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 1000} for i in range(60)}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("a\n")]}, "tools[0].function.name"),
        ({"tools": [function("é")]}, "tools[0].function.name"),
        ({"tools": [function("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [function("f", description=3)]}, "tools[0].function.description"),
        ({"tools": [function("f", description="x" * 16385)]}, "tools[0].function.description"),
        ({"tools": [function("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function("f", color="red")]}, "tools[0].function.color"),
        ({"tools": [function("f", parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [function("f", {"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [function("f", {"description": "x" * 70_000})]}, "tools[0].function.parameters"),
        ({"tools": [function(f"f{i}", BIG) for i in range(3)]}, "tools"),
        ({"tools": [function("f", {"properties": {"a": {"type": "text"}}})]}, "tools"),
        ({"tools": [function("f", {"properties": {"a": {"type": "string", "pattern": "("}}})]}, "tools"),
        ({"tools": [function("f", {"properties": {"a": {"not": {}}}}, strict=True)]}, "tools"),
        ({"tools": ..., "tool_choice": "auto"}, "tool_choice"),
        ({"tools": ..., "tool_choice": "required"}, "tool_choice"),
        ({"tools": ..., "parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothere"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "function": {"name": 3}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}},
         "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice.allowed_tools.tools"),
    ],
)  # fmt: skip
def test_bad_fields_are_refused_by_name(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = post(http, **change)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param in error["message"]
