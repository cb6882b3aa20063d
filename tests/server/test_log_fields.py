"""docs/logs.md names every field that a line of ours can have, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from server.edge import _LOGGED, _POLLED
from server.log_queue import MAX_WAITING_CHARS, MAX_WAITING_LINES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "logs.md").read_text("utf-8")
ROOMS = ("server", "scheduler", "specdec", "model", "kvcache")
OF_EVERY_LINE = {"time", "level", "logger", "message", "exception"}
BY_NAME = {"request_id", "trace_id", *_LOGGED}  # put together elsewhere than in the call
OF_THE_QUEUE = {"dropped"}
DICTS = {"ids", "error.violation.facts()"}  # ``extra`` that is no literal: the ids, and positions in the KV cache


def extras() -> Iterator[ast.expr]:
    """The argument ``extra`` of every call in our code."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Call):
                    yield from (each.value for each in node.keywords if each.arg == "extra")


def literal_names() -> set[str]:
    names: set[str] = set()
    for value in extras():
        if isinstance(value, ast.Dict):
            names |= {key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
        else:
            text = ast.unparse(value)
            assert text in DICTS or text.startswith("'"), f"extra={text}: what fields are these?"
    return names


def test_every_field_of_a_line_is_documented_and_no_other() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)}
    assert documented == literal_names() | OF_EVERY_LINE | BY_NAME | OF_THE_QUEUE


def test_the_paths_that_are_polled_are_named() -> None:
    assert all(f"`{path}`" in PAGE for path in _POLLED)


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"{MAX_WAITING_LINES:,} lines" in PAGE
    assert f"{MAX_WAITING_CHARS // 2**20} MiB" in PAGE
