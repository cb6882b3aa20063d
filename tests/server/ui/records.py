"""Step records as an engine reports them, and what reads a feed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx

from kvcache.manager import KVCacheStats
from scheduler.request import ChoiceTiming
from scheduler.stats import FinishedChoice, SequenceStep, StepRecord
from specdec.plan import StepStats

TIMING = ChoiceTiming(
    arrival_time=1.0,
    first_scheduled_time=1.5,
    first_token_time=2.0,
    last_token_time=4.0,
    num_prompt_tokens=7,
    num_cached_tokens=4,
    num_output_tokens=5,
    num_preemptions=1,
    num_spec_steps=2,
    num_drafted=6,
    num_accepted=3,
)
STAGE_SECONDS = {
    "draft": 0.001, "build": 0.002, "verify": 0.02, "accept": 0.003, "rollback": 0.001, "sync": 0.001,
}  # fmt: skip
_PLAIN = StepRecord(
    step=StepStats(
        num_rows=12,
        stage_seconds=STAGE_SECONDS,
        expected_speedup=1.5,
    ),
    step_seconds=0.03,
    overhead_seconds=0.002,
    num_prefill_tokens=4,
    num_decode_tokens=2,
    num_running=3,
    num_waiting=2,
    num_preemptions=0,
    kv=KVCacheStats(10, 4, 2, 4, 0, 0, block_size=4, used_slots=12, shared_blocks=1),
    prefix_queries=0,
    prefix_hits=0,
    num_prompt_tokens=0,
    num_generation_tokens=0,
    sequences=(),
    first_token_seconds=(),
    inter_token_seconds=(),
    finished=(),
)


def record(*sequences: SequenceStep, finished: Sequence[FinishedChoice] = (), **changes: Any) -> StepRecord:
    """A step that brought what ``sequences`` say."""
    tokens = sum(each.num_emitted for each in sequences)
    values = {"num_generation_tokens": tokens, **changes}
    return replace(_PLAIN, sequences=sequences, finished=tuple(finished), **values)


def got(key: int, emitted: int, drafted: int = 0, accepted: int = 0, drafter: str = "") -> SequenceStep:
    return SequenceStep(emitted, 8, drafted, accepted, drafter, key)


def ended(key: int, reason: str = "length", timing: ChoiceTiming = TIMING, time: float = 4.5) -> FinishedChoice:
    return FinishedChoice(f"secret-{key}", 0, reason, timing, time, last_of_request=True, key=key)


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def parsed(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event. Strict about the framing."""
    assert b"\r" not in raw
    assert raw.endswith(b"\n\n")
    events = []
    for block in raw[:-2].split(b"\n\n"):
        if block.startswith(b": "):
            continue
        name, data = block.split(b"\n")
        assert name.startswith(b"event: ")
        assert data.startswith(b"data: ")
        events.append((name[7:].decode(), json.loads(data[6:])))
    return events


def feed_of(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a feed as they come."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    held = b""
    for piece in response.iter_raw():
        held += piece
        whole, end, held = held.rpartition(b"\n\n")
        if end:
            yield from parsed(whole + end)
