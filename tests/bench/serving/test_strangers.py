"""``truedraft bench`` against servers that are wrong, foreign, failing or gone: all of it is counted and told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.serving.bench import run_bench
from server.commands import CommandError
from tests.bench.serving.builders import quick_options, report_of, silent
from tests.bench.serving.stranger import Stranger, honest, wrong

OURS = "truedraft_"


def run(stranger: Stranger, folder: Path, **changes: Any) -> tuple[int, dict[str, Any]]:
    with stranger.serving() as url:
        code = run_bench(quick_options(folder, url, **changes), silent)
    return code, report_of(folder)


def test_a_server_whose_outputs_differ_between_modes_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(Stranger(ids=wrong, claims_ours=True), tmp_path, modes=("off", "k4", "auto"), rounds=2)
    assert code == 1
    by_mode = {one["label"]: one["truedraft"]["equivalence"] for one in report["results"]}
    assert by_mode["k4"]["different"] == by_mode["k4"]["compared"] == 8
    assert by_mode["off"]["different"] == by_mode["auto"]["different"] == 0
    assert report["equivalence"]["different"] == 8
    assert not report["passed"]
    assert "output token 5" in report["equivalence"]["differences"][0]
    assert "DIFFERENT: " in capsys.readouterr().out
    assert "Outputs differ" in (tmp_path / "report.html").read_text("utf-8")


def test_a_difference_is_found_by_text_where_no_ids_are_sent(tmp_path: Path) -> None:
    code, report = run(Stranger(ids=wrong, claims_ours=True, sends_ids=False), tmp_path, modes=("off", "k4"))
    assert code == 1
    assert report["results"][1]["truedraft"]["equivalence"]["by"] == "texts"
    assert report["results"][1]["truedraft"]["equivalence"]["different"] == 4


def test_the_modes_are_asked_for_by_our_fields(tmp_path: Path) -> None:
    stranger = Stranger(claims_ours=True)
    code, _ = run(stranger, tmp_path, modes=("off", "k3:ngram", "auto"))
    assert code == 0
    asked = {json.dumps(body.get("speculation"), sort_keys=True) for body in stranger.seen}
    assert asked == {'{"num_speculative_tokens": 0}', '{"drafter": "ngram", "num_speculative_tokens": 3}', "null"}


def test_a_mode_that_the_server_cannot_run_is_left_out_with_the_reason(tmp_path: Path) -> None:
    said: list[str] = []
    with Stranger(claims_ours=True).serving() as url:
        options = quick_options(tmp_path, url, modes=("off", "k9", "k2:oracle"))
        assert run_bench(options, said.append) == 0
    assert any("mode k9 left out: it drafts at most 8 tokens" in line for line in said)
    assert any("mode k2:oracle left out: it has no drafter oracle; it has ngram" in line for line in said)
    assert {one["label"] for one in report_of(tmp_path)["results"]} == {"off"}


def test_a_foreign_server_is_measured_as_it_is_and_what_is_missing_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = Stranger(refuses=frozenset({"cache_salt", "ignore_eos"}))
    said: list[str] = []
    with stranger.serving() as url:
        assert run_bench(quick_options(tmp_path, url, modes=("off", "auto"), rounds=2), said.append) == 0
    (one,) = report_of(tmp_path)["results"]
    assert one["label"] == "server"
    assert one["completed"] == 8
    assert one["total_output_tokens"] == 8 * 6
    assert set(one["truedraft"]["missing"]) == {
        "draft cost", "alignment overhead", "KV fragmentation", "acceptance length",
    }  # fmt: skip
    assert any("does without cache_salt, which it refuses (400: unknown field cache_salt)" in line for line in said)
    assert not any({"cache_salt", "ignore_eos", "speculation"} & set(body) for body in stranger.seen)
    assert all("return_token_ids" in body for body in stranger.seen[-4:])
    assert "no KV fragmentation: its /metrics answers 404" in capsys.readouterr().out


def test_figures_of_vllms_metrics_are_taken_by_name(tmp_path: Path) -> None:
    stranger = Stranger()
    stranger.metrics = "vllm:spec_decode_num_drafts_total 10\nvllm:prefix_cache_queries_total 5\n"
    _, report = run(stranger, tmp_path)
    missing = report["results"][0]["truedraft"]["missing"]
    assert report["targets"][0]["metrics"] == "vllm:"
    assert missing["draft cost"] == "its /metrics has no step_duration_seconds_sum"


def test_refusals_and_failures_are_counted_apart_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statuses = {6: 503, 7: 429, 8: 500}  # the first two are the warm-up's
    stranger = Stranger(claims_ours=True, status=lambda n: statuses.get(n, 200), cut=lambda n: n == 9)
    code, report = run(stranger, tmp_path, modes=("off",), rounds=2)
    assert code == 1
    (one,) = report["results"]
    assert one["truedraft"]["refused"] == {"HTTP 503: said 503": 1, "HTTP 429: said 429": 1}
    (failed, *more) = sorted(one["truedraft"]["failures"])
    assert "HTTP 500: said 500" in (failed, *more)
    assert sum(one["truedraft"]["failures"].values()) == 2
    assert (one["completed"], one["failed"]) == (4, 4)
    assert one["truedraft"]["equivalence"]["unfinished"] == 4
    out = capsys.readouterr().out
    assert "2 refused (503, 429), 2 failed" in out
    assert "1 x HTTP 500: said 500" in out


def test_what_is_only_shed_is_no_failure(tmp_path: Path) -> None:
    stranger = Stranger(claims_ours=True, status=lambda n: 503 if n == 5 else 200)
    code, report = run(stranger, tmp_path, modes=("off",), rounds=2)
    assert (code, report["refused"], report["failures"]) == (0, 1, 0)


def test_a_target_that_dies_is_told_and_what_there_is_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = Stranger(claims_ours=True, dies_at=10)  # the warm-up's two, two rounds of four
    code, report = run(stranger, tmp_path, modes=("off",), rounds=4)
    assert code == 1
    assert "does not answer any more" in report["stopped"]
    assert len(report["results"][0]["truedraft"]["rounds"]) == 3
    assert "stopped: " in capsys.readouterr().out


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt: a process that a shell has put in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_a_report_of_what_there_is(tmp_path: Path) -> None:
    stranger = Stranger(claims_ours=True)
    stranger.arrived = lambda n: os.kill(os.getpid(), signal.SIGINT) if n == 13 else None
    with pytest.raises(KeyboardInterrupt):
        run(stranger, tmp_path, modes=("off",), rounds=5)
    report = report_of(tmp_path)
    assert report["stopped"] == "interrupted"
    assert len(report["results"][0]["truedraft"]["rounds"]) == 2
    assert not report["passed"]
    assert "interrupted" in (tmp_path / "report.html").read_text("utf-8")


def test_several_targets_are_compared_in_turns_and_each_agrees_with_itself(tmp_path: Path) -> None:
    other = Stranger(ids=lambda body: [i + 1 for i in honest(body)])
    with Stranger().serving() as first, other.serving() as second:
        options = quick_options(tmp_path, f"a={first}", f"b={second}", rounds=2)
        assert run_bench(options, silent) == 0
    a, b = report_of(tmp_path)["results"]
    assert (a["label"], b["label"]) == ("a", "b")
    assert a["truedraft"]["ratio"] is None
    assert b["truedraft"]["ratio"]["over"] == "a"


def test_requests_are_the_same_in_all_modes_and_others_in_the_next_round(tmp_path: Path) -> None:
    stranger = Stranger(claims_ours=True)
    run(stranger, tmp_path, modes=("off", "auto"), rounds=2)
    by_salt: dict[str, list[str]] = {}
    for body in stranger.seen:
        by_salt.setdefault(body["cache_salt"], []).append(body["prompt"])
    runs = [sorted(prompts) for salt, prompts in by_salt.items() if "warm-up" not in salt]
    assert len(runs) == 4
    assert runs[0] == runs[1] != runs[2] == runs[3]


def test_a_server_that_refuses_the_prompt_ends_the_run_with_its_words(tmp_path: Path) -> None:
    said = "the warm-up of own, 2 at a time failed: HTTP 400: said 400"
    with Stranger(claims_ours=True, status=lambda n: 400).serving() as url, pytest.raises(CommandError, match=said):
        run_bench(quick_options(tmp_path, url), silent)


def test_nobody_at_the_address_is_one_line(tmp_path: Path) -> None:
    with Stranger().serving() as url:
        pass
    with pytest.raises(CommandError, match=r"--target http://127.0.0.1:\d+: GET /v1/models: "):
        run_bench(quick_options(tmp_path, url), silent)


def test_the_key_is_that_of_the_named_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    keys: list[str | None] = []
    stranger = Stranger(claims_ours=True)
    with stranger.serving() as url:
        handler = stranger._server.RequestHandlerClass
        original = handler.do_POST  # type: ignore[attr-defined]

        def noting(self: Any) -> None:
            keys.append(self.headers["Authorization"])
            original(self)

        handler.do_POST = noting  # type: ignore[attr-defined]
        assert run_bench(replace(quick_options(tmp_path, url), api_key_env="A_KEY"), silent) == 0
    assert set(keys) == {"Bearer secret"}
    assert "secret" not in (tmp_path / "report.json").read_text("utf-8")
