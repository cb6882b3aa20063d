"""The docs hold to the code: whatever one names exists in the other."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from server.chat.schema import CHAT_NOT_SUPPORTED, OF_TEMPLATES, ChatRequest
from server.metrics import PREFIX, Metrics
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
    first_cells = [row[0] for row in table_rows(section(API, "POST /v1/completions"))]
    documented = set().union(*map(codes, first_cells))
    assert documented == set(CompletionRequest.model_fields) | set(NOT_SUPPORTED)


def test_every_field_of_a_chat_is_documented_and_no_other() -> None:
    fields = section(API, "POST /v1/chat/completions").partition("\n### ")[0]
    documented = set().union(*(codes(row[0]) for row in table_rows(fields)))
    assert documented == {*ChatRequest.model_fields, *CHAT_NOT_SUPPORTED, *OF_TEMPLATES}


def test_every_endpoint_is_documented_and_no_other() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "server" / "routes").glob("*.py"))
    served = {
        f"{verb.upper()} {path.replace(':path', '')}"
        for verb, path in re.findall(r'@router\.(get|post)\(\s*"([^"]+)"', sources)
    }
    served |= {"GET /docs", "GET /openapi.json"}  # FastAPI's own
    documented = set().union(*(codes(row[0]) for row in table_rows(API[: API.index("\n## ")])))
    assert documented == served


def metric_names() -> set[str]:
    metrics = Metrics(
        model_name="m",
        max_speculative_tokens=2,
        exactness_level=0,
        audits=True,
        cache_config={"block_size": 16},
        drafters=("ngram",),
        drafter_memory={"suffix": lambda: 0},
    )
    return {
        family.name.removeprefix(PREFIX) + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    }


@pytest.mark.case("L 26516")
def test_every_metric_is_documented_and_no_other() -> None:
    documented = set()
    for row in table_rows(METRICS):
        documented |= {re.sub(r"\{.*\}", "", name) for name in codes(row[0])}
    assert documented == metric_names()


def test_every_query_in_the_docs_names_real_metrics() -> None:
    used = set(re.findall(rf"{PREFIX}(\w+?)(?:_bucket|_sum|_count)?[\[{{]", METRICS))
    assert used
    assert used <= metric_names()


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
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for name in codes(page.read_text("utf-8")):
        if re.fullmatch(r"(?:server|scheduler|specdec|kvcache|model|bench|tests|docs)/[\w./]*", name):
            assert (ROOT / name).exists(), name
