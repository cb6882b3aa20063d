"""The faults still fit the code, and the tests that ought to notice them exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.catalogue import EQUIVALENCE, MUTANTS
from tests.mutants.mutant import Mutant, StaleEdit

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_an_edit_fits_the_source_exactly_once_and_is_still_a_program(mutant: Mutant) -> None:
    edited = mutant.edited((ROOT / mutant.file).read_text(encoding="utf-8"))
    if mutant.file.endswith(".py"):
        ast.parse(edited)


@pytest.mark.parametrize("selection", sorted({s for m in MUTANTS for s in m.tests} | set(EQUIVALENCE)))
def test_the_tests_that_ought_to_notice_exist(selection: str) -> None:
    file, *names = selection.split("[")[0].split("::")
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for name in names:
        (found,) = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name]
        body = found.body


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("source", ["", "a = 1\na = 1\n"])
def test_an_edit_that_does_not_fit_exactly_once_is_an_error(source: str) -> None:
    mutant = Mutant("a is 2", "a.py", "a = 1\n", "a = 2\n", ())
    with pytest.raises(StaleEdit, match=r"a is 2: this stands \d times in a\.py"):
        mutant.edited(source)
