"""What /metrics says of a server that works, waits, stands still and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, metric, running
from tests.server.holding import HeldExecutor
from tests.server.test_disconnect import assert_idle, wait_for


class Server:
    def __init__(self, service: Service, executor: HeldExecutor, base: str) -> None:
        self.service, self.executor, self.base = service, executor, base

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(
            f"{self.base}/v1/completions", json={"model": MODEL_NAME, **body}, timeout=60, trust_env=False
        )


@pytest.fixture(scope="module")
def server(tiny_model: Path, model_home: Path) -> Iterator[Server]:
    """One seat, and vLLM's names too."""
    made: list[HeldExecutor] = []

    def wrap(executor: Any) -> Any:
        made.append(HeldExecutor(executor))
        return made[0]

    service = build_service(tiny_model, model_home, wrap=wrap, max_num_seqs=1, metrics_alias="vllm", stall_timeout=1000)
    with running(service) as base:
        yield Server(service, made[0], base)


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server) -> Iterator[None]:
    yield
    server.executor.let_go()
    assert_idle(server.base)


def test_an_idle_server_is_ready_and_nobody_waits(server: Server) -> None:
    assert metric(server.base, "ready") == metric(server.base, "engine_healthy") == 1
    assert metric(server.base, "oldest_waiting_seconds") == metric(server.base, "engine_step_age_seconds") == 0


def test_a_step_that_hangs_and_who_waits_behind_it_are_seen_to_grow_older(server: Server) -> None:
    ages = ("engine_step_age_seconds", "oldest_waiting_seconds")
    server.executor.hold()
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(server.post, prompt="a", max_tokens=2) for _ in range(2)]
        wait_for(lambda: server.executor.waits, "no step began")
        wait_for(lambda: metric(server.base, "oldest_waiting_seconds") > 0, "nobody waits")
        before = [metric(server.base, name) for name in ages]
        after = [metric(server.base, name) for name in ages]
        assert all(0 < was < now for was, now in zip(before, after, strict=True))
        server.executor.let_go()
        assert [answer.result().status_code for answer in answers] == [200, 200]
    wait_for(lambda: [metric(server.base, name) for name in ages] == [0, 0], "somebody still waits")


def test_a_server_that_shuts_down_is_not_ready(server: Server) -> None:
    server.service.draining = True
    try:
        assert metric(server.base, "ready") == 0
        assert metric(server.base, "engine_healthy") == 1
    finally:
        server.service.draining = False
    assert metric(server.base, "ready") == 1


def test_answers_are_counted_by_their_status_but_for_those_to_machines_that_poll(server: Server) -> None:
    def counted() -> list[float]:
        return [metric(server.base, "http_responses_total", code=code) for code in ("200", "400", "404", "405")]

    before = counted()
    assert server.post(prompt="a", max_tokens=1).status_code == 200
    assert server.post(prompt="a", max_tokens=-1).status_code == 400
    assert httpx.get(f"{server.base}/nowhere", trust_env=False).status_code == 404
    assert httpx.get(f"{server.base}/v1/completions", trust_env=False).status_code == 405
    for path in ("/health", "/live", "/metrics"):
        assert httpx.get(f"{server.base}{path}", trust_env=False).status_code == 200
    assert [now - was for now, was in zip(counted(), before, strict=True)] == [1, 1, 1, 1]


def test_the_parts_of_building_a_batch_are_observed_once_a_step(server: Server) -> None:
    assert server.post(prompt="a b c", max_tokens=5).status_code == 200
    steps = metric(server.base, "step_duration_seconds_count", stage="build")
    for part in ("positions", "slots", "block_tables", "mask"):
        assert metric(server.base, "batch_build_seconds_count", part=part) == steps > 0
        assert metric(server.base, "batch_build_seconds_sum", part=part) > 0  # on torch there are masks


def test_vllms_names_are_told_beside_ours(server: Server) -> None:
    assert server.post(prompt="a b", max_tokens=3, ignore_eos=True).status_code == 200
    told = httpx.get(f"{server.base}/metrics", trust_env=False).text
    (line,) = [line for line in told.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert float(line.rsplit(" ", 1)[1]) == metric(server.base, "generation_tokens_total") > 0


def test_what_runs_is_told_as_the_answers_carry_it(server: Server) -> None:
    fingerprint = server.post(prompt="a", max_tokens=1).json()["system_fingerprint"]
    assert metric(server.base, "build_info", system_fingerprint=fingerprint, exactness="L0") == 1
