"""Locust itself, with the locustfile, against a real server whose every forward takes 20 ms more.

So queueing and steps take most of the time, a run costs little, and what both sides measured can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from load_test.scrape import all_names

from bench.process import free_port, server_process
from tests.server.builders import MODEL_NAME, save_tiny_model
from tests.server.chat_builders import save_chat_model

LOCUSTFILE = Path(__file__).parents[2] / "deploy" / "locust" / "locustfile.py"
SEATS, ROOM, USERS = 3, 6, 6
FLAGS = (
    "--served-model-name", MODEL_NAME, "--max-num-seqs", str(SEATS), "--max-waiting", str(ROOM), "--num-blocks", "256",
    "--num-threads", "1", "--log-level", "error", "--drafter", "ngram", "--draft-length", "fixed",
    "--num-speculative-tokens", "3",
)  # fmt: skip
SLOW = {"point": "verify", "action": "hang", "seconds": 0.02}
SHORT = ("--classes", "chat,code,copy")  # prompts that the tiny model's context can hold


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("locust")
    model = save_chat_model(save_tiny_model(folder / "plain"), folder / "chat")
    with server_process(["--model", str(model), *FLAGS], folder / "log", module="bench.faults") as url:
        assert httpx.post(f"{url}/faults", json=SLOW, trust_env=False).status_code == 200
        yield url


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, *SHORT, *flags]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("LOCUST_", "LOAD_"))}


def run(url: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the report (empty without one), and all that was printed."""
    report = folder / "report.json"
    done = subprocess.run(
        command(url, "--headless", "--only-summary", "--stop-timeout", "30", "--report", str(report), *flags),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, json.loads(report.read_text("utf-8")) if report.exists() else {}, done.stdout


def test_a_run_agrees_with_what_the_server_measured(server: str, tmp_path: Path) -> None:
    slo = "failed<0.001,shed<0.001,ttft_p99<60,acceptance_length>1"
    flags = ("-u", str(USERS), "-r", str(USERS), "-t", "10s", "--output-tokens", "16-32", "--slo", slo)
    code, report, printed = run(server, tmp_path, *flags)
    assert code == 0, printed
    total, account = report["total"], report["server"]
    assert total["requests"]["completed"] == total["requests"]["ended"] > USERS
    assert report["unfinished"] == 0
    assert 16 <= total["tokens"]["output"] / total["requests"]["ended"] <= 32
    assert total["tokens"]["output"] == account["counts"]["output_tokens"]
    for name in ("ttft", "itl", "tpot", "e2e"):
        assert total[name]["count"] == account[name]["count"], name
        assert total[name]["mean"] == pytest.approx(account[name]["mean"], rel=0.1), name
        assert 0 < total[name]["p50"] <= total[name]["p95"] <= total[name]["p99"] <= total[name]["max"]
    assert total["acceptance"] == pytest.approx(account["acceptance"])
    assert total["tokens"]["per_chunk"] > 1
    # Half of the users wait for a seat.
    assert total["ttft"]["mean"] > account["queue"]["mean"] > 0.25 * total["e2e"]["mean"]
    assert set(report["classes"]) == {"chat", "code", "copy"}
    for row in ("METRIC   TTFT", "METRIC   ITL", "METRIC   TPOT", "METRIC   E2E", "POST     /v1/completions [code]"):
        assert row in printed
    assert "met    acceptance_length>1" in printed


def test_an_overloaded_open_loop_sheds_and_misses_its_objective(server: str, tmp_path: Path) -> None:
    flags = ("-u", "2", "-r", "2", "--rate", "12", "-t", "5s", "--endpoint", "chat", "--cancel", "0.3", "--seed", "1")
    code, report, printed = run(server, tmp_path, *flags, "--output-tokens", "24", "--slo", "shed<0.1,failed<0.001")
    assert code == 3, printed
    total, account = report["total"], report["server"]
    requests = total["requests"]
    assert requests["failed"] == 0, report["total"]["reasons"]
    # Two users that waited for their answers could not fill the seats and the queue.
    assert min(requests["completed"], requests["cancelled"], requests["shed"]) > 0
    assert account["rejections"] == {"queue_full": requests["shed"]}
    assert account["finished"].get("length", 0) == requests["completed"]
    assert account["finished"].get("abort", 0) == pytest.approx(requests["cancelled"], abs=3)  # some ended just before
    assert total["late"]["count"] == requests["ended"]
    assert [line["met"] for line in report["slo"]] == [False, True]
    assert "SHED     /v1/chat/completions 503 overloaded" in printed
    assert "METRIC   late start" in printed


def test_a_step_load_has_figures_for_each_step(server: str, tmp_path: Path) -> None:
    flags = ("--steps", "1,4", "--step-seconds", "3", "--warm-up", "0.5", "--output-tokens", "8")
    code, report, printed = run(server, tmp_path, *flags)
    assert code == 0, printed
    first, second = report["steps"]
    assert (first["users"], second["users"]) == (1, 4)
    assert sum(report["warm_up"].values()) > 0
    assert second["figures"]["tokens_per_second"] > 1.3 * first["figures"]["tokens_per_second"]
    ended = [step["figures"]["requests"]["ended"] for step in report["steps"]]
    assert min(ended) > 0
    assert sum(ended) == report["total"]["requests"]["ended"]


def test_several_processes_make_one_report(server: str, tmp_path: Path) -> None:
    flags = ("--processes", "2", "-u", "4", "-r", "4", "-t", "4s", "--output-tokens", "8", "--prompt-tokens", "40")
    code, report, printed = run(server, tmp_path, *flags)
    assert code == 0, printed
    total = report["total"]
    assert total["requests"]["completed"] == report["server"]["finished"]["length"]
    assert total["tokens"]["prompt"] == 40 * total["requests"]["completed"] > 0


def test_a_test_can_be_started_and_read_in_the_web_page(server: str, tmp_path: Path) -> None:
    port = free_port()
    flags = ("--web-host", "127.0.0.1", "--web-port", str(port), "--stop-timeout", "10")
    with (tmp_path / "log").open("wb") as log:
        locust = subprocess.Popen(
            command(server, *flags), cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as http:
            assert wait_for(lambda: http.get("/").status_code == 200)
            form = {"user_count": 2, "spawn_rate": 2, "host": server, "output_tokens": "8", "slo": "ttft_p50<60"}
            assert http.post("/swarm", data=form).json()["success"]
            assert wait_for(lambda: http.get("/load-report").json()["total"]["requests"]["completed"] > 3)
            http.get("/stop")
            report = http.get("/load-report").json()
            assert report["flags"]["output_tokens"] == "8"
            assert report["total"]["tokens"]["output"] == 8 * report["total"]["requests"]["completed"]
            assert [line["met"] for line in report["slo"]] == [True]
    finally:
        locust.terminate()
        locust.wait(30)


def wait_for(holds: Any) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError, KeyError):
            if holds():
                return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("flags", "code", "line"),
    [
        (("--cancel", "2"), 2, "locust: --cancel must be in 0..1; it is 2"),
        (("--model", "nowhere", "-t", "2s"), 1, "404 model_not_found"),
    ],
)
def test_what_cannot_work_says_so(server: str, tmp_path: Path, flags: tuple[str, ...], code: int, line: str) -> None:
    ended, _, printed = run(server, tmp_path, *flags)
    assert (ended, line in printed) == (code, True), printed


def test_a_server_that_is_not_there_ends_the_test(tmp_path: Path) -> None:
    code, report, printed = run(f"http://127.0.0.1:{free_port()}", tmp_path, "-t", "30s")
    assert (code, report) == (1, {}), printed
    assert "the test cannot run: GET /v1/models: ConnectionRefusedError" in printed


def test_the_server_has_every_metric_that_is_asked_for(server: str) -> None:
    text = httpx.get(f"{server}/metrics", trust_env=False).text
    lines = text.splitlines()
    families = {line.split()[2].removeprefix("truedraft_") for line in lines if line.startswith("# TYPE")}
    assert all_names() <= families
