"""A step that fails over its audits, in the real engine: the live answers are those of a server without any."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from server.service import Service
from tests.server.builders import build_service, metric, running
from tests.server.test_audits import AUDITED, EXTRAS, body, info, wait_for_audits

STAGES = ("batch", "forward", "after the forward", "sampler", "after the sampler")


class FailsOverAudits:
    """Raises in every second step that holds audits, at each of STAGES in turn."""

    def __init__(self, step: Any) -> None:
        self.stages = cycle(STAGES)
        self.stage: str | None = None  # where this step raises
        self.num_with_audits = 0
        self.raised: list[str] = []
        self.num_live = 0  # that stood beside the audits of steps that raised
        for name in ("_build", "_accept"):
            setattr(step, name, getattr(self, name)(getattr(step, name)))
        executor = step._executor
        forward = executor.forward
        executor.forward = self._forward(forward)

    def _raise_at(self, *stages: str) -> None:
        if self.stage in stages:
            self.raised.append(self.stage)
            raise RuntimeError(f"planted: {self.stage}")

    def _build(self, build: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wrapped(work: Any) -> Any:
            live = [one for one in work if not one.sequence.table.private]
            self.stage = None
            if len(live) < len(work):
                self.num_with_audits += 1
                if self.num_with_audits % 2:
                    self.stage = next(self.stages)
                    self.num_live += len(live)
            self._raise_at("batch")
            return build(work)

        return wrapped

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(batch: Any, **options: Any) -> Any:
            self._raise_at("forward")
            output = forward(batch, **options)
            self._raise_at("after the forward")
            return output

        return wrapped

    def _accept(self, accept: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def wrapped(work: Any, logits: Any) -> None:
            self._raise_at("sampler")
            accept(work, logits)
            self._raise_at("after the sampler")

        return wrapped


async def ask(base: str, bodies: list[dict[str, Any]]) -> list[Any]:
    gate = asyncio.Semaphore(12)
    async with httpx.AsyncClient(base_url=base, timeout=120, trust_env=False) as client:

        async def one(request: dict[str, Any]) -> Any:
            async with gate:
                response = await client.post("/v1/completions", json=request | {"stream": False})
                return response.status_code, response.json().get("choices")

        return await asyncio.gather(*map(one, bodies))


def answers(service: Service, bodies: list[dict[str, Any]], check: Callable[[str], None]) -> list[Any]:
    with running(service) as base:
        got = asyncio.run(ask(base, bodies))
        check(base)
    return got


def test_whatever_an_audit_breaks_in_a_step_the_live_answers_are_the_same(tiny_model: Path, model_home: Path) -> None:
    rng = random.Random(0)
    bodies = [body(rng, seed, EXTRAS) for seed in range(40)]
    for request in bodies:
        if request.get("n", 1) == 1 and "logprobs" not in request:
            # Few tokens, so that drafts are right, and a history of them that is kept from step to step.
            request |= {"logit_bias": {"40": 90, "41": 90, "42": 90}, "frequency_penalty": 0.3, "max_tokens": 16}
    plain = answers(build_service(tiny_model, model_home, ledger=True), bodies, lambda base: None)
    service = build_service(tiny_model, model_home, ledger=True, **AUDITED, audit_share=1.0, num_speculative_tokens=4)
    faults = FailsOverAudits(service.engine._step)

    def check(base: str) -> None:
        found = wait_for_audits(base)
        assert found["enabled"]
        assert set(found["dropped"]) == {"step_failed"}
        assert found["results"]["mismatch"] == 0
        assert found["results"]["match"] > 0
        assert sum(found["results"].values()) == sum(len(choices) for _, choices in plain)
        assert metric(base, "equivalence_audits_enabled") == 1
        assert metric(base, "request_success_total", finished_reason="error") == 0
        assert metric(base, "spec_decode_num_accepted_tokens_total") > 0
        assert service.engine.healthy

    assert answers(service, bodies, check) == plain
    assert {status for status, _ in plain} == {200}
    assert set(faults.raised) == set(STAGES)
    assert faults.num_live > 0


def test_the_gauge_falls_to_0_when_failing_steps_switch_audits_off(tiny_model: Path, model_home: Path) -> None:
    service = build_service(tiny_model, model_home, **AUDITED)
    accept = service.engine._step._accept  # type: ignore[attr-defined]

    def fails(work: Any, logits: Any) -> None:
        if any(one.sequence.table.private for one in work):
            raise RuntimeError("planted")
        accept(work, logits)

    service.engine._step._accept = fails  # type: ignore[attr-defined]
    bodies = [request_of(seed) for seed in range(8)]
    with running(service) as base:
        assert metric(base, "equivalence_audits_enabled") == 1
        for request in bodies:
            assert asyncio.run(ask(base, [request]))[0][0] == 200
            wait_for_audits(base)
        assert metric(base, "equivalence_audits_enabled") == 0
        assert metric(base, "equivalence_audits_total", result="dropped") == 8
        assert not info(base)["enabled"]
        assert httpx.get(f"{base}/health").status_code == 200


def request_of(seed: int) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "the quick", "max_tokens": 4, "seed": seed}
