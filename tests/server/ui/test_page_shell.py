"""The files of the page: what serves them, and what may stand in them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import httpx
import pytest

from server.ui import shell
from server.ui.shell import PAGE, STATIC, load_shell, open_paths

ROOT = Path(__file__).parents[3]
FILES = load_shell(keys=False)
INDEX = FILES[PAGE].body.decode()


@pytest.mark.parametrize("path", sorted(FILES))
def test_every_file_comes_under_the_strict_policy_and_as_what_it_is(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.content == FILES[path].body
    assert answer.headers["content-type"] == FILES[path].media_type
    policy = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy
    assert {"base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= set(policy)
    assert not any("unsafe" in part or "*" in part or "http" in part for part in policy)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_nothing_in_the_page_is_inline() -> None:
    assert "<style" not in INDEX
    assert not re.search(r"\s(style|on\w+)\s*=", INDEX)
    scripts = re.findall(r"<script\b([^>]*)>(.*?)</script>", INDEX, re.DOTALL)
    assert scripts
    assert all("src=" in attributes and not body for attributes, body in scripts)


def test_no_file_names_another_host() -> None:
    for path in STATIC.iterdir():
        hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", path.read_text("utf-8")))
        assert hosts <= {"www.w3.org"}, path.name  # the name of SVG's elements, which nobody fetches


def test_no_script_makes_markup_or_code_of_a_text() -> None:
    forbidden = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc")
    assert [path.name for path in STATIC.glob("*.js") if forbidden.search(path.read_text("utf-8"))] == []


def test_what_the_page_loads_is_there_and_nothing_else_is() -> None:
    wanted = set(re.findall(r'(?:href|src)="ui/([\w.]+)"', INDEX)) | {"index.html"}
    for path in STATIC.glob("*.js"):
        wanted |= set(re.findall(r'from "\./([\w.]+)"', path.read_text("utf-8")))
    assert wanted == {path.name for path in STATIC.iterdir()}


def test_the_page_is_installed_with_the_package() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert "server.ui" in config["packages"]
    assert config["package-data"]["server.ui"] == ["static/*"]


def test_a_file_that_the_browser_has_is_not_sent_again(http: httpx.Client) -> None:
    first = http.get(f"{PAGE}/app.js")
    again = http.get(f"{PAGE}/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = http.get(f"{PAGE}/charts.css", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200


def test_head_answers_without_a_body(http: httpx.Client) -> None:
    answer = http.head(PAGE)
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(FILES[PAGE].body)


def test_a_slash_at_the_end_leads_to_the_page(http: httpx.Client) -> None:
    answer = http.get(f"{PAGE}/", follow_redirects=True)
    assert answer.url.path == PAGE
    assert answer.content == FILES[PAGE].body


@pytest.mark.parametrize("path", ["/ui/shell.py", "/ui/static/app.js", "/ui/..%2fshell.py", "/ui/app.js/"])
def test_nothing_else_is_served(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_what_is_no_file_of_a_page_is_not_served_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text(INDEX)
    (tmp_path / "app.js~").write_text("an older one")
    (tmp_path / ".DS_Store").write_bytes(b"\0")
    (tmp_path / "__pycache__").mkdir()
    monkeypatch.setattr(shell, "STATIC", tmp_path)
    assert set(load_shell(keys=False)) == {PAGE}


def test_what_is_open_without_a_key_is_the_page_alone() -> None:
    assert open_paths(FILES) == {PAGE, f"{PAGE}/", *(f"{PAGE}/{path.name}" for path in STATIC.iterdir())} - {
        f"{PAGE}/index.html"
    }


def test_the_page_knows_whether_there_are_keys() -> None:
    assert 'data-keys="no"' in INDEX
    assert b'data-keys="yes"' in load_shell(keys=True)[PAGE].body
