"""truedraft preflight end to end: a live server, a server that is none, recorded traffic on a tiny model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from bench.preflight import equivalence
from bench.preflight.checklist import Line
from bench.preflight.info import server_info
from bench.preflight.live import acceptance_line, audit_counts, load_numbers, preflight_live, speculation_numbers
from bench.preflight.recorded import RecordedOptions, preflight_recorded
from bench.preflight.scrape import Scrape, Window, watch, window
from server import cli
from server.assemble import load
from server.commands import CommandError
from server.settings import load_settings
from specdec.drafters.registry import AUTO, DRAFTER_NAMES
from tests.server.builders import CORPUS, build_service, running, save_tiny_model

INFO = {"exactness": {"level": "L0", "detail": "every check passed"}, "settings": {"audit_rate": 0.01}}
CHECKLIST = {
    "equivalence",
    "exactness level",
    "memory-bound",
    "acceptance",
    "ITL against plain",
    "TTFT against plain",
    "KV fragmentation",
    "rollback",
    "audit",
    "alerts",
}


def not_verified(*loaded: object) -> Line:
    return Line("equivalence", "unknown", "not run in this test")


def silent(line: str) -> None:
    """Progress nobody reads."""


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # Drafts in any case: what the controller makes of a tiny model's times depends on what else the machine does.
    with running(
        build_service(tiny_model, tmp_path_factory.mktemp("home"), audit_rate=1.0, draft_length="fixed")
    ) as url:
        yield url


def text(**samples: float) -> str:
    lines = []
    for name, value in samples.items():
        base, _, place = name.partition("__")
        label = f',{place.split("_")[0]}="{place.split("_")[1]}"' if place else ""
        lines.append(f'truedraft_{base}{{model_name="m",engine="0"{label}}} {value}')
    return "# HELP x y\n# TYPE x counter\n" + "\n".join(lines) + "\npython_info{} 1\n"


def two(before: dict[str, float], after: dict[str, float]) -> Window:
    first, last = (Scrape.parse(text(**samples)) for samples in (before, after))
    return window(server_info(INFO), first, last, [first, last], 2.0, "http://x")


STEPS = "iteration_tokens_total_count"


def test_rates_are_those_between_the_two_scrapes() -> None:
    seen = two({STEPS: 10, "generation_tokens_total": 100}, {STEPS: 20, "generation_tokens_total": 160})
    assert not seen.since_start
    assert seen.delta("generation_tokens_total") == 60
    assert load_numbers(seen)["tokens_per_second"] == 30.0
    assert seen.delta("never_heard_of") is None


def test_a_server_that_idles_between_the_scrapes_is_judged_since_its_start() -> None:
    seen = two({STEPS: 10, "generation_tokens_total": 100}, {STEPS: 10, "generation_tokens_total": 100})
    assert seen.since_start
    assert seen.delta("generation_tokens_total") == 100
    assert load_numbers(seen)["tokens_per_second"] is None


def test_a_restart_between_the_scrapes_is_an_error() -> None:
    with pytest.raises(CommandError, match="restarted between two scrapes"):
        two({STEPS: 10, "generation_tokens_total": 100}, {STEPS: 2, "generation_tokens_total": 5})


def test_acceptance_comes_from_the_counters_by_position() -> None:
    counters = {
        "spec_decode_num_drafts_total": 10,
        "spec_decode_num_draft_tokens_total": 40,
        "spec_decode_num_accepted_tokens_total": 20,
        "spec_decode_num_accepted_tokens_per_pos_total__position_0": 9,
        "spec_decode_num_accepted_tokens_per_pos_total__position_1": 5,
        "spec_decode_num_speculative_tokens_count": 15,
        "generation_tokens_total": 30,
    }
    seen = two({STEPS: 0, **dict.fromkeys(counters, 0.0)}, {STEPS: 15, **counters})
    numbers = speculation_numbers(seen)
    assert numbers == {"acceptance_rate": 0.5, "acceptance_length": 3.0, "tokens_per_step": 2.0, "rate_at": [0.9, 0.5]}
    assert acceptance_line(seen).answer == "yes"
    assert acceptance_line(two({STEPS: 0}, {STEPS: 5})).answer == "unknown"


def test_quantiles_are_linear_within_a_bucket() -> None:
    name = "inter_token_latency_seconds_bucket__le_"
    counts = {"0.01": 0, "0.02": 50, "0.04": 100, "+Inf": 100}
    seen = two({STEPS: 0}, {STEPS: 1, **{name + le: count for le, count in counts.items()}})
    assert seen.quantile("inter_token_latency_seconds", 0.25) == pytest.approx(0.015)
    assert seen.quantile("inter_token_latency_seconds", 0.75) == pytest.approx(0.03)
    assert seen.quantile("time_to_first_token_seconds", 0.5) is None


def test_audits_are_counted_by_result() -> None:
    seen = two({STEPS: 0}, {STEPS: 1, "equivalence_audits_total__result_match": 7})
    assert audit_counts(seen) == {"match": 7.0}
    assert audit_counts(two({STEPS: 0}, {STEPS: 1})) is None


def test_a_live_server_answers_every_line(live: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    flags = ["--seconds", "0", "--probe", "2", "--tokens", "24", "--rounds", "2", "--json", str(file)]
    code = cli.main(["preflight", "--url", live + "/", *flags])
    out, found = capsys.readouterr().out, json.loads(file.read_text())
    lines = {line["name"]: line for line in found["checklist"]}
    assert set(lines) == CHECKLIST
    assert all(line["name"] + ": " + line["reason"] in out for line in found["checklist"])
    assert code == (0 if found["passed"] else 1)
    assert found["passed"] == ("no" not in {found["fit"]["answer"], *(line["answer"] for line in lines.values())})
    assert lines["exactness level"]["answer"] == "yes"
    assert lines["rollback"]["answer"] == "yes"
    assert lines["equivalence"]["numbers"] == {"answers_compared": 4, "answers_different": 0}
    assert lines["ITL against plain"]["numbers"]["rounds"] == 2
    assert lines["audit"]["answer"] in ("yes", "unknown")  # an audit may not have ended yet
    assert lines["audit"]["numbers"].items() >= {"audit_rate": 1.0, "mismatch": 0.0}.items()
    assert lines["memory-bound"]["answer"] == "unknown"
    assert found["server"]["acceptance_length"] >= 1.0


def test_looking_at_a_server_sends_it_no_request(live: str) -> None:
    def generated() -> float | None:
        return Scrape.parse(httpx.get(f"{live}/metrics").text).value("generation_tokens_total")

    before = generated()
    preflight_live(live, seconds=0.1, probe=0, tokens=8, rounds=1, rules=None, verify=not_verified, report=silent)
    assert generated() == before


class _Stranger(BaseHTTPRequestHandler):
    """Some other server: answers by path."""

    answers: ClassVar[dict[str, tuple[int, str]]] = {}

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, "nothing"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def stranger() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stranger)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


OK_INFO = (200, json.dumps(INFO))
STRANGERS: dict[str, tuple[dict[str, tuple[int, str]], str]] = {
    "no such path": ({}, "/v1/server_info answers 404"),
    "an error": ({"/v1/server_info": (500, "oh")}, "/v1/server_info answers 500"),
    "another JSON": ({"/v1/server_info": (200, '{"a": 1}')}, "not that of a Truedraft server"),
    "no JSON": ({"/v1/server_info": (200, "<html>")}, "not that of a Truedraft server"),
    "no metrics": ({"/v1/server_info": OK_INFO, "/metrics": (200, "vllm:x 1\n")}, "no metric named truedraft_"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_server_that_is_none_of_ours_is_one_line(
    name: str, stranger: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, reason = STRANGERS[name]
    monkeypatch.setattr(_Stranger, "answers", answers)
    assert cli.main(["preflight", "--url", stranger]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"truedraft: error: --url {stranger}: ")
    assert reason in error


def test_an_unreachable_server_is_one_line() -> None:
    with pytest.raises(CommandError, match=r"--url http://127\.0\.0\.1:1: /v1/server_info cannot be read: "):
        watch("http://127.0.0.1:1", 0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--url", "localhost:1"], "--url must begin with http"),
        (["--url", "http://x", "--seconds", "-1"], "--seconds must be from 0"),
        (["--url", "http://x", "--probe", "-1"], "--probe must be at least 0"),
        (["--url", "http://x", "--verify", "quick"], "--verify needs --model"),
        (["--url", "http://x", "--rules", "/nowhere"], "--rules /nowhere does not exist"),
        (["--url", "http://x", "--", "--dtype", "float32"], "flags of serve need --model"),
        (["--traffic", "x", "--samples", "0"], "--samples must be at least 1"),
        (["--traffic", "x", "--", "--num-speculative-tokens", "-1"], "num_speculative_tokens"),
        ([], "one of the arguments --traffic --url is required"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["preflight", *flags])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 1
    assert reason in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traffic") / "traffic.jsonl"
    bodies = [{"prompt": CORPUS[i % 4], "max_tokens": 24, "arrival": i, "temperature": 0.0} for i in range(6)]
    path.write_text("\n".join([*map(json.dumps, bodies), "nonsense"]))
    return path


def test_recorded_traffic_answers_every_line_and_names_the_bad_one(tiny_model: Path, traffic: Path) -> None:
    settings = load_settings({"model": str(tiny_model), "num_threads": 1})
    options = RecordedOptions(traffic, samples=3, tokens=24, rounds=2, serve=False, rules=None)
    found = preflight_recorded(options, settings, [], not_verified, silent)
    assert {line.name for line in found.checklist} == CHECKLIST
    assert [bad.line for bad in found.bad_lines] == [7]
    assert "line 7: is not JSON" in found.as_text()
    assert "the model's own outputs to 3 of the requests" in found.outputs
    assert {replay.drafter for replay in found.replays} == {*DRAFTER_NAMES, AUTO} - {"none"}
    assert "auto, k = 16" in next(line.reason for line in found.checklist if line.name == "acceptance")
    assert found.load is not None
    assert found.load.requests_per_second == 1.0
    assert {line.name: line.answer for line in found.checklist}["ITL against plain"] == "unknown"
    json.dumps(found.as_json(), allow_nan=False)


def test_the_answers_of_a_drifting_server_would_be_a_no(live: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality is looked at, not assumed: a server whose answers with speculation differ must not get a yes."""
    from bench.preflight import play

    real = play._pass

    def spoiled(bodies: Any, salt: str, speculative: bool) -> list[dict[str, Any]]:
        made = real(bodies, salt, speculative)
        return [{**body, "logit_bias": {"5": 100}} for body in made] if speculative else made

    monkeypatch.setattr(play, "_pass", spoiled)
    found = preflight_live(live, seconds=0, probe=2, tokens=8, rounds=1, rules=None, verify=not_verified, report=silent)
    equivalence = found.checklist[0]
    assert equivalence.answer == "no"
    assert "0 of 2 answers of a server identical" in equivalence.reason
    assert not found.passed


def test_verify_runs_on_the_model_that_was_loaded(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equivalence, "BOUNDED_POSITIONS", 20)
    settings = load_settings({"model": str(tiny_model), "num_threads": 1})
    loaded, folder = load(settings, silent)
    told: list[str] = []
    line = equivalence.run_verify("bounded", settings, loaded, folder, told.append)
    assert any("once more, to draft for itself" in one for one in told), told  # the drafter model is proved, too
    assert line.answer == "yes"
    assert 0 < int(line.numbers["positions"] or 0) <= 20
    assert equivalence.run_verify("none", settings, loaded, folder, silent).answer == "unknown"
