"""docs/cases.md and the tests agree: every row that holds has a test that names it, every name is a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_docs import table_rows

ROOT = Path(__file__).resolve().parents[1]
HEADINGS = {"seen at"}


def rows() -> dict[str, str]:
    """First reference -> what is missing ("" if nothing)."""
    found = [row for row in table_rows((ROOT / "docs" / "cases.md").read_text("utf-8")) if row[0] not in HEADINGS]
    states = {row[0].split(",")[0]: row[2] for row in found}
    assert len(states) == len(found), "two rows have the same first reference"
    return states


def marked() -> dict[str, set[str]]:
    """Reference -> the tests that name it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                    assert node.name.lower().startswith("test"), f"{path.name}: {node.name} is no test"
                    assert mark.args, f"{path.name}: {node.name} names no case"
                    for argument in mark.args:
                        found.setdefault(ast.literal_eval(argument), set()).add(f"{path.name}::{node.name}")
    return found


def test_every_mark_is_a_row() -> None:
    assert set(marked()) <= set(rows())


@pytest.mark.parametrize(("reference", "state"), rows().items())
def test_every_row_has_a_test_or_says_what_is_missing(reference: str, state: str) -> None:
    assert re.fullmatch(r"(?:|in part: .+|open: .+)", state), state
    is_open = state.startswith("open")
    assert (reference not in marked()) == is_open, "open rows have no test, all others have one"


def test_equivalence_and_sampling_have_no_open_row() -> None:
    text = (ROOT / "docs" / "cases.md").read_text("utf-8")
    finished = text[text.index("## Equivalence") : text.index("## Logprobs")]
    assert "open:" not in finished
