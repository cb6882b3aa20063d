"""The docs hold to the code: whatever one names exists in the other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from server.chat.schema import CHAT_NOT_SUPPORTED, OF_TEMPLATES, ChatRequest
from server.metrics.kinds import PREFIX
from server.metrics.page import metrics_markdown
from server.metrics.schema import SCHEMA, label_values
from server.schemas import NOT_SUPPORTED, CompletionRequest
from server.setting_flags import settings_markdown

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
API = (ROOT / "docs" / "api.md").read_text("utf-8")
METRICS = (ROOT / "docs" / "metrics.md").read_text("utf-8")


def table_rows(text: str) -> list[list[str]]:
    """Cells of every table row of a page, headings and rulers left out."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
    ]
    return [row for i, row in enumerate(rows) if not set(row[0]) <= set("-: ") or i == 0]


def codes(text: str) -> set[str]:
    """What stands between single backquotes."""
    return set(re.findall(r"`([^`]+)`", text))


def section(text: str, heading: str) -> str:
    start = text.index(f"\n## {heading}\n")
    end = text.find("\n## ", start + 1)
    return text[start : end if end >= 0 else len(text)]


def test_the_settings_page_is_the_one_made_from_the_code() -> None:
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == settings_markdown()


def test_every_field_of_a_request_is_documented_and_no_other() -> None:
    fields = section(API, "POST /v1/completions").partition("\n### ")[0]
    documented = set().union(*(codes(row[0]) for row in table_rows(fields)))
    assert documented == set(CompletionRequest.model_fields) | set(NOT_SUPPORTED)


def test_every_field_of_a_chat_is_documented_and_no_other() -> None:
    fields = section(API, "POST /v1/chat/completions").partition("\n### ")[0]
    documented = set().union(*(codes(row[0]) for row in table_rows(fields)))
    assert documented == {*ChatRequest.model_fields, *CHAT_NOT_SUPPORTED, *OF_TEMPLATES}


def test_the_metrics_page_is_the_one_made_from_the_code() -> None:
    assert metrics_markdown() == METRICS


@pytest.mark.case("L 26516")
def test_every_metric_is_documented_and_no_other() -> None:
    names = [metric.shown_name for metric in SCHEMA.values()]
    overview = [name for row in table_rows(section(METRICS, "All metrics"))[1:] for name in codes(row[0])]
    assert overview == names
    assert re.findall(r"(?m)^### `(\w+)`$", METRICS) == names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_that_a_page_asks_for_exists_with_its_labels_and_their_words(page: Path) -> None:
    known = label_values()
    for name, matchers in re.findall(rf"\b({PREFIX}\w+)(?:\{{([^}}`]*)\}})?", page.read_text("utf-8")):
        assert name in known or any(metric.full_name == name for metric in SCHEMA.values()), name
        for label, operator, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers):
            words = known[name][label]
            assert not words or operator in ("=~", "!~") or value in words, (name, label, value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        assert destination.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", destination.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = set(re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)[0].split())
    shown = "\n".join([*re.findall(r"```sh\n(.*?)```", text, re.DOTALL), *codes(text)])
    assert set(re.findall(r"^make (\w+)", shown, re.MULTILINE)) <= targets
    for module in re.findall(r"python -m ([\w.]+)", shown):
        assert importlib.util.find_spec(module), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_our_commands_are_found_where_make_has_installed_them(page: Path) -> None:
    shown = "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
    assert re.findall(r"(?m)^(?:python -m (?!venv\b)|truedraft |locust ).*", shown) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for name in codes(page.read_text("utf-8")):
        if re.fullmatch(r"(?:server|scheduler|specdec|kvcache|model|bench|tests|docs)/[\w./]*", name):
            assert (ROOT / name).exists(), name
