"""docs/attacks.md and the tests agree: what a row is said to be held by exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.test_docs import codes, table_rows

ROOT = Path(__file__).parents[1]
ROWS = [row for row in table_rows((ROOT / "docs" / "attacks.md").read_text("utf-8")) if row[0] != "input"]


def test_there_are_rows() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_every_row_is_held_by_tests_that_exist(row: list[str]) -> None:
    names = codes(row[2])
    assert names
    for name in names:
        path, _, test = name.partition("::")
        tree = ast.parse((ROOT / path).read_text("utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assigned = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                    if isinstance(target, ast.Name)}  # fmt: skip
        assert test in defined | assigned, name
