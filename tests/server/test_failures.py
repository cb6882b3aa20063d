"""When the engine fails: clear answers, and readiness that tells."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from model.batch import PackedBatch
from model.interface import ForwardOutput
from server.service import Service
from specdec.plan import StepPlan, StepResult
from tests.server.builders import MODEL_NAME, build_service, running

BODY = {"model": MODEL_NAME, "prompt": "a", "max_tokens": 3}


class BrokenStep:
    """Raises as often as told, then goes on like the step it stands for."""

    intact = False

    def __init__(self, service: Service) -> None:
        self.failures = 0
        self._step = service.engine._step

    def run(self, plan: StepPlan) -> StepResult:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("secret of the inside at 0xdeadbeef")
        return self._step.run(plan)

    def release(self, seq_id: int) -> None:
        self._step.release(seq_id)

    def check(self) -> None:
        self._step.check()


@pytest.fixture
def broken(tiny_model: Path, model_home: Path) -> Iterator[tuple[BrokenStep, httpx.Client]]:
    service = build_service(tiny_model, model_home)
    step = BrokenStep(service)
    service.engine._step = step
    with running(service) as base, httpx.Client(base_url=base, timeout=60) as client:
        yield step, client


def test_one_failed_step_costs_its_requests_alone(broken: tuple[BrokenStep, httpx.Client]) -> None:
    step, client = broken
    step.failures = 1
    failed = client.post("/v1/completions", json=BODY)
    assert failed.status_code == 500
    error = failed.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "server_error", None)
    assert "secret" not in error["message"]
    assert "0x" not in error["message"]
    assert client.post("/v1/completions", json=BODY).status_code == 200
    assert client.get("/health").status_code == 200


def test_an_engine_that_keeps_failing_is_not_ready_and_refuses(broken: tuple[BrokenStep, httpx.Client]) -> None:
    step, client = broken
    step.failures = 100
    while client.get("/health").status_code == 200:
        assert client.post("/v1/completions", json=BODY).status_code == 500
    health = client.get("/health")
    assert health.status_code == 503
    assert "failed" in health.json()["error"]["message"]
    live = client.get("/live")
    assert live.status_code == 503
    assert live.json()["error"]["code"] == "not_alive"
    refused = client.post("/v1/completions", json={**BODY, "stream": True})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_failed"
    assert refused.headers["retry-after"]


@pytest.mark.parametrize(
    ("value", "change"), [(math.nan, {}), (-math.inf, {}), (-math.inf, {"bad_words": "b"})], ids=str
)
def test_logits_without_a_distribution_are_the_servers_error(
    tiny_model: Path, model_home: Path, value: float, change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = build_service(tiny_model, model_home)
    executor = service.engine._step._executor  # type: ignore[attr-defined]
    forward = executor.forward

    def broken(batch: PackedBatch) -> ForwardOutput:
        with torch.inference_mode():
            result: ForwardOutput = forward(batch)
            result.logits.fill_(value)
        return result

    with running(service) as base, httpx.Client(base_url=base, timeout=60) as client:
        monkeypatch.setattr(executor, "forward", broken)
        failed = client.post("/v1/completions", json={**BODY, **change})
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        monkeypatch.undo()
        assert client.post("/v1/completions", json={**BODY, **change}).status_code == 200
