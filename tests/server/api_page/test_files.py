"""The files of /docs: what serves them, and what may stand in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import httpx
import pytest

from server.api_page.page import CONTENT_SECURITY_POLICY, DOCS, STATIC, SWAGGER_UI, load_docs
from server.ui import shell

ROOT = Path(__file__).parents[3]
FILES = load_docs(keys=False)
INDEX = FILES[DOCS].body.decode()


@pytest.mark.parametrize("path", sorted(FILES))
def test_every_file_comes_under_the_policy_and_as_what_it_is(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path].body
    assert answer.headers["content-type"] == FILES[path].media_type
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_policy_is_the_one_of_the_other_page_but_for_styles_and_markup_of_strings() -> None:
    ours, other = set(CONTENT_SECURITY_POLICY.split("; ")), set(shell.CONTENT_SECURITY_POLICY.split("; "))
    assert ours - other == {"style-src 'self' 'unsafe-inline'"}
    assert other - ours == {"style-src 'self'", "require-trusted-types-for 'script'", "trusted-types 'none'"}


def test_nothing_in_the_page_is_inline_and_no_file_of_ours_names_a_host() -> None:
    assert "<style" not in INDEX
    assert not re.search(r"\s(style|on\w+)\s*=", INDEX)
    scripts = re.findall(r"<script\b([^>]*)>(.*?)</script>", INDEX, re.DOTALL)
    assert scripts
    assert all("src=" in attributes and not body for attributes, body in scripts)
    for path in STATIC.iterdir():
        assert not re.search(r"(?:https?:)?//[\w.-]+\.\w+", path.read_text("utf-8")), path.name


def test_what_the_page_loads_is_there_and_nothing_else_is() -> None:
    wanted = {f"/{path}" for path in re.findall(r'(?:href|src)="(docs/[\w.-]+)"', INDEX)}
    assert wanted | {DOCS} == set(FILES)
    assert {path.name for path in STATIC.iterdir()} | set(SWAGGER_UI) == {
        *(path.rpartition("/")[2] for path in wanted), "index.html",
    }  # fmt: skip


def test_the_page_is_installed_with_the_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert "server.api_page" in config["packages"]
    assert config["package-data"]["server.api_page"] == ["static/*"]


def test_a_slash_at_the_end_leads_to_the_page(http: httpx.Client) -> None:
    answer = http.get(f"{DOCS}/", follow_redirects=True)
    assert answer.url.path == DOCS
    assert answer.content == FILES[DOCS].body


@pytest.mark.parametrize(
    "path", ["/docs/page.py", "/docs/__init__.py", "/docs/index.html", "/docs/oauth2-redirect", "/redoc"]
)
def test_nothing_else_is_served(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404
