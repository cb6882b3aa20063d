"""The page in a real browser, against a real server: what a reader sees and can do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from server.auth.keys import KEYS_VARIABLE, load_keys
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, running
from tests.server.ui.browsing import PATIENCE_MS, Witness, chromium, opened

KEY = "key-of-a-reader-4711"
PROMPT = "the quick brown fox jumps over the lazy dog. the quick brown fox"
SEED = 20_240_229
MOST_TOKENS = 48
LOOPING = {"allowed_token_ids": [70, 71, 72], "ignore_eos": True}  # a text that drafts come true of

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, base: str) -> Iterator[Page]:
    with opened(browser, f"{base}/ui") as page:
        page.route("**/v1/completions", narrow)
        expect(page.locator("#link")).to_have_text("live")
        yield page


def narrow(route: Route) -> None:
    """The page's question, of a text that loops."""
    route.continue_(post_data={**route.request.post_data_json, **LOOPING})


def fill(page: Page, *, tokens: int = MOST_TOKENS, temperature: float = 0.0) -> None:
    page.get_by_label("Prompt", exact=True).fill(PROMPT)
    page.get_by_label("Tokens, at most", exact=True).fill(str(tokens))
    page.get_by_label("Temperature", exact=True).fill(str(temperature))
    page.get_by_label("Seed", exact=True).fill(str(SEED))
    page.get_by_label("Drafter", exact=True).select_option("ngram")
    page.get_by_label("Drafts a step", exact=True).fill("4")


def run(page: Page, **wanted: Any) -> None:
    fill(page, **wanted)
    page.get_by_role("button", name="Run both").click()
    expect(page.locator("#difference")).to_have_attribute("data-equal", re.compile("yes|no"))


def shown_text(page: Page, lane: str) -> str:
    """The tokens of a lane as they are seen."""
    return "".join(page.locator(f"#{lane} .token").all_text_contents())


def background(page: Page, selector: str) -> str:
    return str(page.locator(selector).first.evaluate("(node) => getComputedStyle(node).backgroundColor"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_both_runs_show_the_tokens_that_the_api_gives_and_no_difference(
    page: Page, http: httpx.Client, temperature: float
) -> None:
    run(page, temperature=temperature)
    expect(page.locator("#difference")).to_have_attribute("data-equal", "yes")
    expect(page.locator("#difference")).to_contain_text(f"all {MOST_TOKENS} tokens are identical (seed {SEED})")
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": MOST_TOKENS, "temperature": temperature, "seed": SEED}
    answer = http.post("/v1/completions", json={**body, **LOOPING}).json()
    assert page.locator("#lane-on .token").count() == MOST_TOKENS
    assert shown_text(page, "lane-on") == shown_text(page, "lane-off") == answer["choices"][0]["text"]
    assert re.fullmatch(r"\d+\.\d\d×", page.locator("#speedup").inner_text())


def test_the_ribbon_tells_where_tokens_come_from(page: Page) -> None:
    run(page)
    ways = {
        kind: page.locator(f"#lane-on .token.{kind}").count() for kind in ("accepted", "bonus", "recovered", "plain")
    }
    assert ways["accepted"] > 0
    assert ways["bonus"] + ways["recovered"] > 0
    assert page.locator("#lane-off .token").count() == page.locator("#lane-off .token.plain").count()
    assert background(page, "#lane-on .token.accepted") != background(page, "#lane-off .token.plain")
    # Without colour: each kind has a mark of its own, an accepted draft its place.
    marks = page.locator("#lane-on .token.accepted").evaluate_all("(tokens) => tokens.map((t) => t.dataset.mark)")
    assert set(marks) <= {"1", "2", "3", "4"}
    first_of_draft, later = "#lane-on .token[data-mark='1']", "#lane-on .token.accepted[data-mark='4']"
    if page.locator(later).count():
        assert background(page, first_of_draft) != background(page, later)
    steps = {lane: page.locator(f"#{lane} [role=option]").count() for lane in ("lane-off", "lane-on")}
    assert steps["lane-on"] < steps["lane-off"] == page.locator("#lane-off .token").count()


def test_rejected_drafts_are_seen_where_they_were_rejected(page: Page) -> None:
    run(page)
    step = page.locator("#lane-on [role=option]", has=page.locator(".token.recovered")).first
    step.hover()
    detail = page.locator("#step-detail")
    expect(detail).to_contain_text(re.compile(r"ngram drafted \d+, \d+ accepted"))
    drafted, accepted = map(int, re.findall(r"drafted (\d+), (\d+)", detail.inner_text())[0])
    assert detail.locator(".token.rejected").count() == drafted - accepted > 0
    assert "rejected" in (step.get_attribute("aria-label") or "")


def test_where_traces_are_switched_off_the_runs_are_shown_without(
    browser: Browser, base: str, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "settings", service.settings.model_copy(update={"speculation_trace": False}))
    witness = Witness()
    with opened(browser, f"{base}/ui") as page:
        witness.watch(page)
        page.route("**/v1/completions", narrow)
        expect(page.locator("#run-problem")).to_contain_text("does not tell where tokens come from")
        run(page)
        expect(page.locator("#difference")).to_have_attribute("data-equal", "yes")
        for lane in ("#lane-off", "#lane-on"):
            tokens = page.locator(f"{lane} .token")
            assert tokens.count() == MOST_TOKENS
            assert page.locator(f"{lane} .token.untold").count() == MOST_TOKENS
        text = page.locator("#lane-off .ribbon").inner_text()
        assert text
        assert text == page.locator("#lane-on .ribbon").inner_text()
    assert not witness.complaints


def test_tokens_that_differ_are_shown_as_a_difference(page: Page) -> None:
    answers = 0

    def forge(route: Route) -> None:
        nonlocal answers
        answers += 1
        answer = route.fetch()
        if answers == 1:
            route.fulfill(response=answer)
            return
        events = answer.text().split("\n\n")
        chunk = json.loads(events[0].removeprefix("data: "))
        chunk["choices"][0]["token_ids"][0] += 1
        route.fulfill(response=answer, body="\n\n".join(["data: " + json.dumps(chunk), *events[1:]]))

    page.route("**/v1/completions", forge)
    run(page, tokens=8)
    expect(page.locator("#difference")).to_have_attribute("data-equal", "no")
    expect(page.locator("#difference")).to_contain_text("Different from token 1 on")
    for lane in ("lane-off", "lane-on"):
        expect(page.locator(f"#{lane} .token").first).to_have_class(re.compile("differs"))


def test_what_the_server_refuses_is_told_and_the_page_goes_on(page: Page) -> None:
    fill(page, tokens=100_000)
    page.get_by_role("button", name="Run both").click()
    expect(page.locator("#run-problem")).to_contain_text("max_tokens")
    run(page, tokens=4)
    expect(page.locator("#difference")).to_have_attribute("data-equal", "yes")
    expect(page.locator("#run-problem")).to_be_empty()


def test_the_charts_follow_a_run(page: Page) -> None:
    block_map, steps = page.locator("#kv-canvas"), page.locator("#timeline-canvas")
    expect(block_map).to_have_attribute("aria-label", re.compile(r"256 blocks of 16 tokens"))
    page.evaluate(  # every map that was drawn, and whether a block was in use
        """() => {
          const canvas = document.getElementById("kv-canvas");
          window.maps = new Set();
          window.used = 0;
          new MutationObserver(() => {
            window.maps.add(canvas.toDataURL());
            window.used = Math.max(window.used, Number(/(\\d+) used/.exec(canvas.ariaLabel)[1]));
          }).observe(canvas, { attributes: true, attributeFilter: ["aria-label"] });
        }"""
    )
    page.emulate_media(reduced_motion="no-preference")
    for _ in range(5):  # a tiny model is through before a map was drawn, sometimes
        run(page, tokens=300)
        if page.evaluate("maps.size > 1 && used > 0"):
            break
    assert page.evaluate("maps.size") > 1
    assert page.evaluate("used") > 0
    expect(steps).to_have_attribute("aria-label", re.compile(r"last \d+ steps, medians in ms: step \d"))
    expect(page.locator("#acceptance-chart")).to_have_attribute("aria-label", re.compile(r"1: \d+ %"))
    assert page.locator("#acceptance-chart .bar").count() >= 4
    newest = page.locator("#recent-rows tr").first.locator("td").all_text_contents()
    assert newest[2] in ("length", "stop")
    assert int(newest[5]) == page.locator("#lane-on .token").count()


def requests_shown(page: Page, width: int) -> list[str]:
    """Of the page at another width, so that all of it has been painted again."""
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("async () => { for (let i = 0; i < 4; i++) await new Promise(requestAnimationFrame); }")
    return page.locator("#recent-rows td:first-child").all_text_contents()


def test_a_paused_page_stands_still_until_it_goes_on(page: Page) -> None:
    run(page, tokens=4)
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#link")).to_have_text("paused")
    before = requests_shown(page, 1000)
    run(page, tokens=4)
    assert requests_shown(page, 1100) == before
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("#recent-rows td:first-child").first).not_to_have_text(before[0] if before else "")


def test_a_prompt_is_run_and_its_steps_read_with_the_keyboard_alone(page: Page) -> None:
    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.className"))

    fill(page)
    page.locator(".skip").focus()
    page.keyboard.press("Enter")  # past the head
    seen: list[str] = []
    while focused() != "run":
        page.keyboard.press("Tab")
        seen.append(focused())
        assert len(seen) < 30, seen
    assert seen == ["prompt", "example", "max-tokens", "temperature", "seed", "drafter", "drafts", "run"]
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator("#difference")).to_have_attribute("data-equal", "yes")
    expect(page.locator("#announce")).to_contain_text("Done. No difference")
    while page.evaluate("document.activeElement.closest('.lane')?.id") != "lane-on":
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#lane-on [aria-selected=true]")).to_have_attribute("data-step", "1")
    chosen = page.evaluate(
        "document.getElementById(document.activeElement.getAttribute('aria-activedescendant')).dataset.step"
    )
    assert chosen == "1"
    expect(page.locator("#step-detail")).to_contain_text("Step 2:")
    page.keyboard.press("End")
    last = page.locator("#lane-on [role=option]").count()
    expect(page.locator("#step-detail")).to_contain_text(f"Step {last}:")


def test_nothing_is_asked_of_another_host_and_nothing_is_complained_of(browser: Browser, base: str) -> None:
    witness = Witness()
    with opened(browser, "about:blank") as page:
        witness.watch(page)
        page.goto(f"{base}/ui")
        run(page, tokens=16)
        count = page.locator("#lane-off .token").count()
        page.get_by_role("button", name="Replay side by side").click()
        page.get_by_role("button", name="Theme").click()
        for lane in ("lane-off", "lane-on"):
            expect(page.locator(f"#{lane} .token")).to_have_count(count)
    assert witness.complaints == []
    assert all(url.startswith((f"{base}/", "data:")) for url in witness.requests), witness.requests


def test_with_keys_nothing_is_asked_before_there_is_one_and_a_wrong_one_is_told(
    browser: Browser, tiny_model: Path, model_home: Path
) -> None:
    witness = Witness()
    keys = load_keys(None, {KEYS_VARIABLE: f"reader:{KEY}"})
    with running(build_service(tiny_model, model_home, keys=keys)) as url, opened(browser, "about:blank") as page:
        witness.watch(page)
        page.goto(f"{url}/ui")
        expect(page.get_by_label("API key", exact=True)).to_be_focused()
        data = [asked for asked in witness.requests if "/ui/state" in asked or "/ui/feed" in asked or "/v1/" in asked]
        assert data == []
        page.keyboard.type("not-the-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-problem")).to_have_text("The server did not take this key.")
        page.get_by_label("API key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#key-card")).to_be_hidden()
        run(page, tokens=8)
        page.reload()  # the tab keeps it
        expect(page.locator("#link")).to_have_text("live")
        assert KEY not in "".join(witness.requests)
        assert page.evaluate("localStorage.length") == 1  # the theme
    assert [line for line in witness.complaints if "401" not in line] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_token_can_be_read_in_both_themes(browser: Browser, base: str, scheme: Literal["light", "dark"]) -> None:
    with opened(browser, f"{base}/ui", scheme=scheme) as page:
        page.locator("#outcome").evaluate("(box) => { box.hidden = false; }")
        contrasts = page.evaluate(CONTRASTS)
        assert {"accepted", "bonus", "recovered", "plain"} <= contrasts.keys()
        assert min(contrasts.values()) >= 4.5, contrasts


def test_the_theme_can_be_chosen_and_is_kept(page: Page) -> None:
    pale = background(page, "body")
    for _ in range(2):
        page.get_by_role("button", name="Theme").click()
    expect(page.get_by_role("button", name="Theme")).to_have_text("Theme: dark")
    assert background(page, "body") != pale
    page.reload()
    assert background(page, "body") != pale


def test_a_phone_shows_all_of_it_without_scrolling_sideways(browser: Browser, base: str) -> None:
    with opened(browser, f"{base}/ui", width=360, height=740) as page:
        run(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for name in ("lane-off", "lane-on", "timeline-canvas", "kv-canvas", "acceptance-chart", "run"):
            box = page.locator(f"#{name}").bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360, name


def test_without_the_page_there_is_nothing_of_it(tiny_model: Path, model_home: Path) -> None:
    with running(build_service(tiny_model, model_home, ui=False)) as url:
        for path in ("/ui", "/ui/app.js", "/ui/state", "/ui/feed"):
            assert httpx.get(url + path, trust_env=False).status_code == 404, path


# The contrast of each kind of token, and of what is muted, with what lies behind it.
CONTRASTS = """() => {
  const channels = (colour) => {
    const context = new OffscreenCanvas(1, 1).getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].map((value) => value / 255);
  };
  const luminance = ([r, g, b]) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const colour = channels(getComputedStyle(each).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [1, 1, 1, 1];
  };
  const found = {};
  for (const node of document.querySelectorAll(".legend .token, .legend span, .hint, .tile dt, .link, .readout")) {
    const [a, b] = [luminance(channels(getComputedStyle(node).color)), luminance(behind(node))];
    const name = node.className.replace("token ", "").split(" ")[0] || node.tagName;
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found[name] = Math.min(found[name] ?? Infinity, contrast);
  }
  return found;
}"""
