"""/docs in a real browser, against a real server: all of it comes from there, and it can be tried out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.builders import MODEL_NAME, build_service, running
from tests.server.test_access import ALICE, KEYS, bearer
from tests.server.ui.browsing import PATIENCE_MS, Witness, chromium, opened

QUESTION = {"model": MODEL_NAME, "prompt": "the quick brown fox"}

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def try_out_tokenize(page: Page) -> None:
    """Ask for the tokens of a text in the page itself, as a reader does."""
    operation = page.locator(".opblock", has=page.get_by_text("/tokenize", exact=True))
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.locator("textarea").fill(json.dumps(QUESTION))
    operation.get_by_role("button", name="Execute").click()
    shown = operation.locator(".live-responses-table .response")
    expect(shown.locator(".response-col_status")).to_contain_text("200")
    expect(shown.locator(".response-col_description")).to_contain_text('"count"')


def test_the_page_shows_every_operation_and_asks_no_other_host(browser: Browser, base: str) -> None:
    described = httpx.get(f"{base}/openapi.json", trust_env=False).json()["paths"]
    witness = Witness()
    with opened(browser, "about:blank") as page:
        witness.watch(page)
        page.goto(f"{base}/docs")
        expect(page.locator(".opblock")).to_have_count(sum(map(len, described.values())))
        try_out_tokenize(page)
    assert witness.complaints == []
    assert all(url.startswith((f"{base}/", "data:")) for url in witness.requests), witness.requests
    assert f"{base}/tokenize" in witness.requests


def test_with_keys_the_page_asks_for_one_and_sends_it(browser: Browser, tiny_model: Path, model_home: Path) -> None:
    service = build_service(tiny_model, model_home, keys=KEYS)
    with running(service) as base, httpx.Client(base_url=base, trust_env=False) as http:
        assert http.get("/openapi.json").status_code == 401
        assert http.get("/openapi.json", headers=bearer(ALICE)).status_code == 200
        with opened(browser, f"{base}/docs") as page:
            key = page.get_by_label("API key")
            expect(key).to_be_visible()
            key.fill("wrong")
            page.get_by_role("button", name="Use this key").click()
            expect(page.get_by_role("alert")).to_contain_text("did not take this key")
            key.fill(ALICE)
            page.get_by_role("button", name="Use this key").click()
            expect(key).to_be_hidden()
            try_out_tokenize(page)
