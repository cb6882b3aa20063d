"""The page's own reckoning, in the browser that runs it: events, block maps, gaps, where tokens come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.server.ui.browsing import chromium, opened


@pytest.fixture(scope="module")
def page(base: str) -> Iterator[Page]:
    with chromium() as browser, opened(browser, f"{base}/ui") as page:
        yield page


def ask(page: Page, module: str, script: str, *values: Any) -> Any:
    """What ``script`` makes of ``values`` (its parameters are the module's names and ``values``)."""
    return page.evaluate(
        f"async (values) => {{ const it = await import('/ui/{module}.js'); return ({script})(it, ...values); }}",
        list(values),
    )


def test_events_are_the_same_however_the_network_cut_them(page: Page) -> None:
    sent = 'event: steps\ndata: {"a": "é"}\n\n: ping\n\ndata: first\ndata: second\n\ndata:bare\n\nevent: cut\ndata: of'
    script = """(it, sent, at) => {
      const parser = new it.EventParser();
      return [...parser.push(sent.slice(0, at)), ...parser.push(sent.slice(at))];
    }"""
    expected = [
        {"event": "steps", "data": '{"a": "é"}'},
        {"event": "message", "data": "first\nsecond"},
        {"event": "message", "data": "bare"},
    ]
    for at in range(len(sent)):
        assert ask(page, "client", script, sent, at) == expected, at


@pytest.mark.parametrize(("runs", "blocks"), [("12.3u1c", "............uuuc"), ("", ""), ("1024p", "p" * 1024)])
def test_a_packed_block_map_is_unpacked(page: Page, runs: str, blocks: str) -> None:
    assert ask(page, "store", "(it, runs) => it.unpack(runs)", runs) == blocks


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "kinds"),
    [
        (0, 0, 1, ["plain"]),
        (3, 3, 4, ["accepted", "accepted", "accepted", "bonus"]),
        (3, 1, 2, ["accepted", "recovered"]),
        (2, 0, 1, ["recovered"]),
        (4, 2, 2, ["accepted", "accepted"]),  # the end came with an accepted draft
    ],
)
def test_each_token_has_one_origin(page: Page, drafted: int, accepted: int, emitted: int, kinds: list[str]) -> None:
    step = {"drafted": list(range(drafted)), "accepted": accepted}
    script = "(it, step, emitted) => Array.from({ length: emitted }, (_, i) => it.origin(step, i))"
    assert ask(page, "ribbon", script, step, emitted) == kinds


@pytest.mark.parametrize(
    ("off", "on", "first"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([1, 2], [], 0)],
)
def test_the_first_difference_is_found(page: Page, off: list[int], on: list[int], first: int | None) -> None:
    assert ask(page, "playground", "(it, off, on) => it.firstDifference(off, on)", off, on) == first


def test_a_gap_is_the_time_between_two_steps_of_one_sequence(page: Page) -> None:
    step = {"s": {}, "running": 1, "waiting": 0, "kv": [1, 0, 0, 0, 0]}
    steps = [
        {**step, "n": 1, "t": 1.0, "seqs": [[1, 1, 0, 0, ""], [2, 1, 0, 0, ""]]},
        {**step, "n": 2, "t": 1.25, "seqs": [[1, 3, 2, 2, "ngram"]]},
        {**step, "n": 3, "t": 1.75, "seqs": [[1, 1, 0, 0, ""], [2, 1, 0, 0, ""]]},
    ]
    script = """(it, steps) => {
      const store = new it.Store();
      store.addSteps({ dropped: 0, steps: steps.slice(0, 2) });
      store.addSteps({ dropped: 0, steps: steps.slice(2) });
      return store.steps.map((step) => step.itl);
    }"""
    assert ask(page, "store", script, steps) == [[], [0.25], [0.5, 0.75]]


def test_no_gap_is_made_up_across_steps_that_are_missing(page: Page) -> None:
    step = {"s": {}, "running": 1, "waiting": 0, "kv": [1, 0, 0, 0, 0], "seqs": [[1, 1, 0, 0, ""]]}
    script = """(it, step) => {
      const store = new it.Store();
      store.addSteps({ dropped: 0, steps: [{ ...step, n: 1, t: 1 }] });
      store.addSteps({ dropped: 7, steps: [{ ...step, n: 9, t: 2 }] });
      return [store.steps.map((step) => step.itl), store.dropped];
    }"""
    assert ask(page, "store", script, step) == [[[], []], 7]


def test_what_is_kept_is_bounded(page: Page) -> None:
    script = """(it) => {
      const store = new it.Store();
      for (let n = 1; n <= 5000; n++) {
        store.addSteps({ dropped: 0, steps: [{ n, t: n, s: {}, seqs: [[n, 1, 0, 0, ""]], kv: [] }] });
        store.addRequests([{ key: n, choice: 0 }]);
      }
      return [store.steps.length, store.requests.length, store.steps.at(-1).n, store.requests[0].key];
    }"""
    assert ask(page, "store", script) == [600, 50, 5000, 5000]


def test_a_request_that_is_told_twice_is_shown_once(page: Page) -> None:
    script = """(it) => {
      const store = new it.Store();
      store.setState({ recent: [{ key: 2, choice: 0 }, { key: 1, choice: 0 }] });
      store.addRequests([{ key: 2, choice: 0 }, { key: 2, choice: 1 }]);
      return store.requests.map(({ key, choice }) => [key, choice]);
    }"""
    assert ask(page, "store", script) == [[2, 1], [2, 0], [1, 0]]


@pytest.mark.parametrize(
    ("seconds", "uptime", "seq", "another"),
    [
        (2.0, 102.0, 50, False),
        (2.0, 99.5, 50, False),  # an answer that was late
        (3600.0, 3700.0, 9000, False),  # a page that nobody looked at for an hour
        (20.0, 5.0, 40, True),
        (3600.0, 600.0, 9000, True),  # up for longer than it had been when it was seen last
        (2.0, 101.0, 3, True),  # fewer steps than there were
    ],
)
def test_a_server_that_was_started_again_is_known_as_such(
    page: Page, seconds: float, uptime: float, seq: int, another: bool
) -> None:
    script = """(it, seconds, uptime, seq) => {
      const state = (uptime_s, seq) => ({ server: { uptime_s }, recent: [], seq });
      const store = new it.Store();
      const fresh = store.isAnotherStart(state(1, 0), 0);
      store.setState(state(100, 40), 1e12);
      store.addSteps({ dropped: 0, steps: [{ n: 40, t: 100, s: {}, seqs: [], kv: [] }] });
      return [fresh, store.isAnotherStart(state(uptime, seq), 1e12 + 1000 * seconds)];
    }"""
    assert ask(page, "store", script, seconds, uptime, seq) == [False, another]


def test_the_text_of_a_token_is_never_markup(page: Page) -> None:
    hostile = "<img src=x onerror=alert(1)><b>\u202ebold\n"
    script = """(it, text) => {
      const box = document.querySelector("#lane-on .ribbon");
      const ribbon = new it.Ribbon(box, () => {});
      ribbon.clear(1);
      ribbon.add([{ drafted: [1], accepted: 0, drafter: "<i>", texts: [text], rejected_texts: [text] }]);
      box.append(...it.detail({ drafted: [1], accepted: 0, drafter: "<i>", texts: [text], rejected_texts: [text] }, 0));
      return [box.querySelectorAll("img, b, i").length, box.querySelector(".token").textContent];
    }"""
    elements, shown = ask(page, "ribbon", script, hostile)
    assert elements == 0
    assert shown == "<img src=x onerror=alert(1)><b>▯bold↵"
