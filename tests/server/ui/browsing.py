"""A real browser for the tests of the page, and what they do with it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, sync_playwright

PATIENCE_MS = 60_000  # until something is seen; it comes as soon as it is there


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's own Chromium without a window. CI installs it; elsewhere its tests are skipped without it."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("there is no chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        yield browser
        browser.close()


@dataclass(slots=True)
class Witness:
    """What a page asked of whom, and what it complained of."""

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda line: self._hear(line))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _hear(self, line: ConsoleMessage) -> None:
        if line.type in ("error", "warning"):
            self.complaints.append(line.text)


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, *, width: int = 1280, height: int = 900, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """A new page in a context of its own, with nothing of other pages' storage. It is calm: a picture a second."""
    size: ViewportSize = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()
