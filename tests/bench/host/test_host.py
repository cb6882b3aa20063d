"""``python -m bench.host``: what it counts, and that its shares add up."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from bench.host.__main__ import FORWARD, LOOP, MODEL, Found, Gaps, cpu_seconds, measure, problems, told
from scheduler.stats import StepRecord
from tests.server.builders import build_service, save_tiny_model
from tests.server.ui.records import got, record


def found(**changes: object) -> Found:
    values: dict[str, object] = {
        "streams": 2, "steps": 9, "step_ms": 1.5, "gap_share": 0.04, "parts": {FORWARD: 0.96},
        "cpu": {LOOP: 0.1, "log": 0.04, MODEL: 0.9},
    }  # fmt: skip
    return Found(**(values | changes))  # type: ignore[arg-type]


def test_what_is_wrong_is_a_line() -> None:
    assert problems(found(), 0.05, 0.15) == []
    assert problems(found(gap_share=0.06), 0.05, 0.15) == [
        "the gap between forwards is 6.0% of the time; 5% are allowed"
    ]
    assert problems(found(cpu={LOOP: 0.1, "log": 0.06, MODEL: 0.9}), 0.05, 0.15) == [
        "other threads took 16.0% of a core; 15% are allowed"
    ]
    assert problems(found(steps=0), 0.05, 0.15) == ["no step had every stream: nothing was measured"]
    assert "16.0%" not in told(found())


def test_cpu_is_counted_for_the_thread_that_used_it() -> None:
    def burn(until: threading.Event) -> None:
        while not until.is_set():
            sum(range(1000))

    stop = threading.Event()
    thread = threading.Thread(target=burn, args=(stop,), name="model_0")
    before = cpu_seconds()
    thread.start()
    try:
        while (spent := cpu_seconds()[MODEL] - before.get(MODEL, 0.0)) < 0.1:
            time.sleep(0.05)
    finally:
        stop.set()
        thread.join()
    assert spent >= 0.1


def test_full_steps_of_a_served_load_are_told_apart_and_their_parts_add_up(tmp_path: Path) -> None:
    heard: list[StepRecord] = []
    service = build_service(save_tiny_model(tmp_path / "model"), tmp_path / "home")
    service.engine.on_step = heard.append
    result = asyncio.run(measure(service, 3, 1.5))
    assert result.steps > 10
    full = sum(len(record.sequences) == 3 and not record.num_prefill_tokens for record in heard if record.step)
    assert result.steps < full  # the first of a row of full steps has no beginning that was seen
    assert sum(result.parts.values()) == pytest.approx(1.0, abs=0.01)
    assert result.gap_share == pytest.approx(1.0 - result.parts[FORWARD])
    assert result.cpu[LOOP] > 0


def test_a_step_without_every_stream_or_with_a_prompt_does_not_count() -> None:
    gaps = Gaps(streams=2)
    one, other = got(1, 1), got(2, 1)
    for heard in (
        record(one, num_prefill_tokens=0),
        record(one, other, num_prefill_tokens=5),
        record(one, other, num_prefill_tokens=0),  # full, but what was before it was not
    ):
        gaps.hear(heard)
        assert gaps.steps == []
    gaps.hear(record(one, other, num_prefill_tokens=0))
    assert len(gaps.steps) == 1
