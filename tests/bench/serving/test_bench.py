"""``truedraft bench`` against a real server with a tiny model: all seven figures, and both sides agree."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.serving.bench import run_bench
from bench.serving.html import render
from bench.serving.html_style import DARK, LIGHT
from bench.serving.loops import Request, run_load
from bench.serving.options import Load
from bench.serving.wire import Client
from bench.verify.html_style import DARK as BASE_DARK
from bench.verify.html_style import LIGHT as BASE_LIGHT
from tests.bench.serving.builders import quick_options, report_of, silent
from tests.bench.serving.stranger import Stranger
from tests.bench.test_verify_html import Page
from tests.server.builders import build_service, running, save_tiny_model

MODES = ("off", "k4", "auto")
SEVEN = ("equivalence", "acceptance", "draft_cost", "alignment", "fragmentation")  # beside ITL and TTFT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    service = build_service(model, tmp_path_factory.mktemp("home"), num_blocks=512, block_size=16)
    with running(service) as url:
        yield url


@pytest.fixture(scope="module")
def folder(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with closed and open loops."""
    made = tmp_path_factory.mktemp("bench")
    loads = (Load(seats=1), Load(seats=3), Load(rate=50.0))
    options = quick_options(made, base, modes=MODES, rounds=2, loads=loads, tokens=10, slos=("ttft:60000", "itl:60000"))
    assert run_bench(options, silent) == 0
    return made


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    return report_of(folder)


def test_every_cell_and_mode_has_all_seven_figures(report: dict[str, Any]) -> None:
    results = report["results"]
    assert len(results) == 3 * len(MODES)
    for one in results:
        ours = one["truedraft"]
        assert ours["missing"] == {}
        assert all(ours[name] is not None for name in SEVEN)
        assert ours["equivalence"]["by"] == "token ids"
        assert ours["equivalence"]["different"] == 0
        assert 0 <= ours["draft_cost"]["share_of_step"] <= 1
        assert ours["alignment"]["bytes_moved"] == 0
        assert all(one[f"p{q}_{name}_ms"] > 0 for q in (50, 90, 99) for name in ("ttft", "itl", "tpot", "e2el"))
        assert ours["queue_ms"]["p99"] >= 0
        assert ours["good_share"] == 1
    assert report["passed"]


def test_all_outputs_but_the_first_of_each_request_are_compared(report: dict[str, Any]) -> None:
    answers = 3 * len(MODES) * 2 * 4
    assert report["equivalence"] == {"compared": answers - 8, "different": 0, "differences": []}


def test_drafts_are_made_in_the_modes_that_ask_for_them(report: dict[str, Any]) -> None:
    drafts = dict.fromkeys(MODES, 0)
    for one in report["results"]:
        drafts[one["truedraft"]["mode"]] += one["truedraft"]["acceptance"]["drafts"]
    assert drafts["off"] == 0
    assert drafts["k4"] > 0


def test_the_clients_counts_are_those_of_the_server(report: dict[str, Any]) -> None:
    for one in report["results"]:
        ours, server = one["truedraft"], one["truedraft"]["server_times_ms"]
        assert one["completed"] == 8
        assert one["total_output_tokens"] == ours["generation_tokens"] == 80
        assert one["total_input_tokens"] == ours["prompt_tokens"]
        assert server["ttft"]["count"] == server["e2el"]["count"] == server["tpot"]["count"] == 8
        assert server["itl"]["count"] == ours["num_gaps"]


def test_the_servers_times_lie_within_the_clients(report: dict[str, Any]) -> None:
    """The client sees the same events later: by the network and its own delay, which no test can bound."""
    for one in report["results"]:
        server = one["truedraft"]["server_times_ms"]
        assert one["mean_ttft_ms"] > 0.9 * server["ttft"]["mean"]
        assert one["mean_e2el_ms"] > 0.9 * server["e2el"]["mean"]


def test_empty_slots_are_told_apart_and_add_up(report: dict[str, Any]) -> None:
    for one in report["results"]:
        found = one["truedraft"]["fragmentation"]
        assert found["draft"] + found["last_block"] + found["reserved"] == pytest.approx(found["ratio"], abs=1e-4)
        assert 0 < found["last_block"] < 1
        if one["truedraft"]["mode"] == "off":
            assert found["draft"] == 0


def test_others_are_over_the_first_mode_of_their_cell(report: dict[str, Any]) -> None:
    for one in report["results"]:
        ratio = one["truedraft"]["ratio"]
        assert (ratio is None) == (one["label"] == "off")
        assert ratio is None or (ratio["over"] == "off" and ratio["low"] <= ratio["median"] <= ratio["high"])


def test_each_line_of_results_is_a_result_with_vllms_names(folder: Path, report: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]
    assert lines == report["results"]
    names = {
        "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
        "max_concurrency", "duration", "completed", "total_input_tokens", "total_output_tokens",
        "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
        "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms",
    }  # fmt: skip
    assert all(names <= set(line) for line in lines)
    assert [line["max_concurrency"] for line in lines[::3]] == [1, 3, None]
    assert [line["request_rate"] for line in lines[::3]] == ["inf", "inf", 50.0]


def test_the_page_stands_alone_and_holds_every_figure(folder: Path) -> None:
    text = (folder / "report.html").read_text("utf-8")
    page = Page(text)
    assert not re.search(r"(?:src|href)=\"(?!#)|url\(|@import|<script", text)
    for name in ("1 equivalence", "2 acceptance", "3 draft cost", "4 ITL ms", "5 TTFT ms", "6 alignment",
                 "7 KV fragmentation", "Outputs alike"):  # fmt: skip
        assert name in page.text, name
    assert sum(tag == "svg" for tag, _ in page.tags) >= 14
    assert "nan" not in text.lower().replace("resonan", "")


def test_the_page_is_made_of_the_report_alone(folder: Path, report: dict[str, Any]) -> None:
    assert render(report) == (folder / "report.html").read_text("utf-8")


def test_what_a_server_says_cannot_become_markup(report: dict[str, Any]) -> None:
    evil = json.loads(json.dumps(report).replace('"off"', '"<script>alert(1)</script>"'))
    assert "<script" not in render(evil)


def test_a_report_of_nothing_is_still_a_page(report: dict[str, Any]) -> None:
    page = Page(render({**report, "results": [], "stopped": "interrupted", "workloads": {}}))
    assert "Nothing was measured." in page.text


@pytest.mark.parametrize(("colours", "grounds"), [(LIGHT, BASE_LIGHT), (DARK, BASE_DARK)], ids=["light", "dark"])
def test_lines_and_bars_stand_out_from_the_ground(
    colours: tuple[str, ...], grounds: dict[str, tuple[str, str]]
) -> None:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ground = light(grounds["page"][1])
    for colour in colours:
        a, b = sorted((light(colour), ground))
        assert (b + 0.05) / (a + 0.05) >= 3, colour  # what WCAG asks of graphics


def test_a_sampled_answer_is_the_same_in_every_mode(base: str, tmp_path: Path) -> None:
    options = quick_options(tmp_path, base, modes=MODES, loads=(Load(seats=4),), temperature=0.9)
    assert run_bench(options, silent) == 0
    assert report_of(tmp_path)["equivalence"]["compared"] == 8


def test_block_sizes_are_compared_on_servers_of_their_own(
    base: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = build_service(model, tmp_path, num_blocks=2048, block_size=2)
    with running(small) as other:
        options = quick_options(tmp_path, f"block 2={other}", f"block 16={base}", modes=("auto",), tokens=9)
        assert run_bench(replace(options, block_sizes=(2, 16)), silent) == 0
    two, sixteen = (one["truedraft"] for one in report_of(tmp_path)["results"])
    assert (two["block_size"], sixteen["block_size"]) == (2, 16)
    assert two["variant"] == "block 2"
    assert report_of(tmp_path)["equivalence"]["compared"] == 4  # of one against the other
    assert two["fragmentation"]["last_block"] < sixteen["fragmentation"]["last_block"]
    assert two["prefix_hit_rate"] is not None
    assert "hits" in capsys.readouterr().out
    page = Page((tmp_path / "report.html").read_text("utf-8")).text
    assert "Prefix cache hit rate" in page
    assert "block size" in page


def test_chats_are_sent_as_messages(tmp_path: Path) -> None:
    stranger = Stranger(claims_ours=True)
    with stranger.serving() as url:
        assert run_bench(quick_options(tmp_path, url, chat=True), silent) == 0
    assert all(body["messages"][0]["role"] == "user" and "prompt" not in body for body in stranger.seen)
    assert report_of(tmp_path)["results"][0]["backend"] == "openai-chat"


def test_a_stream_is_read_whole_wherever_its_pieces_are_cut() -> None:
    async def ask(url: str) -> tuple[list[int], list[int]]:
        client = Client(url)
        body = {"model": "m", "prompt": "p", "max_tokens": 7, "return_token_ids": True}
        found = await run_load(client, "/v1/completions", [Request("p", ("g", "w", 0), body)] * 3, Load(seats=2), 0)
        await client.close()
        return [trace.num_tokens for trace in found.traces], [len(trace.gaps) for trace in found.traces]

    with Stranger(chunk=3).serving() as url:
        assert asyncio.run(ask(url)) == ([7, 7, 7], [2, 2, 2])
