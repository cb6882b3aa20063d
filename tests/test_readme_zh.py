"""README.zh.md says what README.md says: its commands, examples, links, numbers and tables are the same."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text("utf-8")
CHINESE = (ROOT / "README.zh.md").read_text("utf-8")
EACH_OTHER = {"README.md", "README.zh.md"}

_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def prose(page: str) -> str:
    return _BLOCK.sub("", page)


def links(page: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if target not in EACH_OTHER]


def codes(page: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", prose(page)))


def first_cells(page: str) -> list[str]:
    return [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")]


def test_commands_and_examples_are_the_same_to_the_character() -> None:
    assert _BLOCK.findall(CHINESE) == _BLOCK.findall(ENGLISH)


def test_the_same_things_stand_between_backquotes() -> None:
    assert codes(CHINESE) == codes(ENGLISH)


def test_links_lead_to_the_same_places_in_the_same_order() -> None:
    assert links(CHINESE) == links(ENGLISH)


def test_sections_are_the_same() -> None:
    def depths(page: str) -> list[int]:
        return [len(marks) for marks in re.findall(r"^(#+) ", prose(page), re.MULTILINE)]

    assert depths(CHINESE) == depths(ENGLISH)


def test_the_tables_have_the_same_rows() -> None:
    assert first_cells(CHINESE) == first_cells(ENGLISH)


def test_the_same_numbers_are_named() -> None:
    def numbers(page: str) -> set[str]:
        return set(re.findall(r"\d[\d,.]*\d|\d", re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose(page))))

    assert numbers(CHINESE) == numbers(ENGLISH)


def test_each_leads_to_the_other() -> None:
    assert "(README.zh.md)" in ENGLISH
    assert "(README.md)" in CHINESE
