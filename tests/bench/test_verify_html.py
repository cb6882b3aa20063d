"""report.html: well formed, self-contained, escaped, and everything a person needs of a failure is on it."""

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser

import pytest

from bench.verify.html import duration, render
from bench.verify.html_style import DARK, LIGHT
from bench.verify.markup import Html, element, visible
from tests.bench.report_builders import FACTORS, HOSTILE, build_report, failed_report, interrupted_report

VOID = {"meta", "br"}
REPORTS = {
    "passed": build_report(),
    "failed": failed_report(),
    "interrupted": interrupted_report(),
    "empty": {"schema": 1, "passed": False},
}


class Page(HTMLParser):
    """Raises AssertionError on a page that is not well nested; keeps tags, attributes, ids, texts by tag."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), attrs
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open[-1][0] == tag, (tag, self.open[-1])
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1][0], data))

    def attributes(self, name: str) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get(name)) is not None]

    @property
    def text(self) -> str:
        return " ".join(" ".join(data for tag, data in self.texts if tag != "style").split())


@pytest.mark.parametrize("name", REPORTS)
def test_every_page_is_well_nested_and_its_links_lead_somewhere(name: str) -> None:
    page = Page(render(REPORTS[name]))
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {link.removeprefix("#") for link in page.attributes("href")} <= set(ids)
    assert all(link.startswith("#") for link in page.attributes("href"))


@pytest.mark.parametrize("name", REPORTS)
def test_no_page_loads_anything_or_has_a_script(name: str) -> None:
    text = render(REPORTS[name])
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    assert not page.attributes("src")
    assert "url(" not in text
    assert "@import" not in text
    text.encode("utf-8")
    policies = [attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


@pytest.mark.parametrize("name", REPORTS)
def test_every_table_has_a_caption_and_every_heading_cell_a_scope(name: str) -> None:
    page = Page(render(REPORTS[name]))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") > 0
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("passed", "✓ Passed"), ("failed", "✗ Failed"), ("interrupted", "! Interrupted"), ("empty", "✗ Failed")],
)
def test_the_verdict_is_the_first_thing_after_the_name(name: str, verdict: str) -> None:
    page = Page(render(REPORTS[name]))
    assert next(data for tag, data in page.texts if tag == "strong") == verdict


def test_the_verdict_line_has_positions_differences_model_level_time_and_command() -> None:
    report = build_report()
    text = Page(render(report)).text
    for part in (
        f"{report['coverage']['positions']:,} positions compared",
        "0 differences",
        "SmolLM2-135M-Instruct",
        "level L0",
        "5 min 1 s",
        report["command"],
    ):
        assert part in text[:700], part


@pytest.mark.parametrize("change", ["case", "reference", "positions"])
def test_a_report_that_contradicts_its_passed_is_shown_as_failed(change: str) -> None:
    report = build_report()
    if change == "case":
        report["cases"][5]["status"] = "a word of a later version"
    elif change == "reference":
        report["reference"]["status"] = "failed"
    else:
        report["coverage"]["positions"] = 0
    assert "✗ Failed" in render(report)
    assert "✓ Passed" not in render(report)


def test_every_value_of_every_factor_is_a_row_or_a_column_of_the_matrix() -> None:
    report = build_report(num_cases=3)  # most values have no case: they are shown as not covered
    page = Page(render(report))
    rows = [data for tag, data in page.texts if tag == "th"]
    for factor, values in FACTORS.items():
        for value in values:
            assert value in rows, (factor, value)


def test_a_cell_tells_passed_failed_and_not_run_apart_without_colour() -> None:
    def cells(report: dict[str, object]) -> set[str]:
        table = re.search(r'<table class="matrix">(.*?)</table>', render(report), re.DOTALL)
        assert table is not None
        return set(re.findall(r'<td class="(\w+)"[^>]*>(?:<a [^>]*>)?<b>(.)</b>', table[1]))

    assert cells(build_report()) == {("passed", "✓")}
    assert cells(failed_report()) == {("passed", "✓"), ("failed", "✗"), ("error", "!")}
    assert cells(interrupted_report()) == {("passed", "✓"), ("notrun", "○")}


def test_a_failure_shows_both_sequences_the_logits_the_batch_and_the_replay_command() -> None:
    report = failed_report((" the", "\n", " cat", " sat", "x", " dog", " ran", "?"))
    page = Page(render(report))
    article = page.text[page.text.index("q017 failed") :]
    divergence = report["cases"][17]["divergence"]
    for part in (
        "request 3 emits another token at output index 35",
        "→ 35 7001 ␣ cat 7002 ␣ dog",  # the first difference, both sides in one row
        "≠ 37 15 x (ended)",
        "34 12 ⏎ 12 ⏎",
        "The two token sequences around it",
        "The two highest raw logits at output index 35",
        "21.2499981",
        "21.2500019",
        "3 (this one) 90 1 11 12 7002 16 3 of 4",
        divergence["replay"],
    ):
        assert part in article, part
    assert ("code", divergence["replay"]) in page.texts
    assert "RuntimeError: the pool ran out of blocks" in article
    assert "a small gap is a near tie. prompt class" in article


def test_a_difference_in_a_logprob_alone_is_marked_at_its_index() -> None:
    report = failed_report()
    divergence = report["cases"][17]["divergence"]
    divergence |= {"kind": "logprob", "got": divergence["expected"], "got_tokens": divergence["expected_tokens"]}
    assert "→ 35" in Page(render(report)).text


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_of_a_hostile_tokenizer_cannot_become_markup(text: str) -> None:
    harmless, hostile = Page(render(failed_report(("a",) * 8))), failed_report((text,) * 8)
    for holder in (hostile["model"], hostile["cases"][17], hostile["reference"]):
        holder |= {"name": text, "reason": text, "what": text, "exactness_detail": text}
    hostile["command"] = hostile["cases"][17]["id"] = hostile["suite"] = text
    hostile["cases"][17]["factors"] |= {text: text}
    hostile["cases"][17]["divergence"]["replay"] = text
    page = render(hostile)
    page.encode("utf-8")
    # What cannot be seen, or would turn the text around, is spelled out.
    assert not [c for c in page if unicodedata.category(c) in ("Cf", "Cs") or (c < " " and c not in "\n\t\r")]
    # One factor more, hence rows more; but no kind of element that the harmless page lacks.
    assert {tag for tag, _ in Page(page).tags} == {tag for tag, _ in harmless.tags}
    assert not [attrs for _, attrs in Page(page).tags if set(attrs) & {"onerror", "src"}]
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f]", page)


def test_what_cannot_be_seen_is_shown_as_a_mark() -> None:
    shown = Page(visible(" a\n\t\r\x1b\u200b\u202e\u00a0\ufeff\ud800")).text
    assert shown == "␣ a ⏎ ⇥ ⟨CR⟩ ⟨U+001B⟩ ⟨U+200B⟩ ⟨U+202E⟩ ⟨U+00A0⟩ ⟨U+FEFF⟩ ⟨U+D800⟩"
    assert "(no text)" in visible("")


def test_only_what_is_marked_as_html_is_not_escaped() -> None:
    assert element("b", "<i>", Html("<i>"), title='"') == '<b title="&quot;">&lt;i&gt;<i></b>'


def test_below_l0_the_page_says_what_the_level_means_and_why() -> None:
    report = build_report()
    assert "What level" not in render(report)
    report["model"] |= {"exactness_level": "L2", "exactness_detail": "expert products differ in the last bit"}
    text = Page(render(report)).text
    assert "What level L2 means" in text
    assert "greedy up to float ties" in text
    assert text.count("expert products differ in the last bit") == 2  # in the facts and in its section


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_has_a_contrast_of_at_least_four_and_a_half(colours: dict[str, tuple[str, str]]) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name, pair in colours.items():
        dark, light = sorted(map(luminance, pair))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name


def test_durations_read_as_a_person_says_them() -> None:
    assert [duration(s) for s in (0.84, 42.4, 301.2, 3720)] == ["0.8 s", "42 s", "5 min 1 s", "1 h 2 min"]
    assert duration(None) == "an unknown time"
