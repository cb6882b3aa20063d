"""Requests, choices and records as tracing sees them."""

from __future__ import annotations

from typing import Any

from kvcache.manager import KVCacheStats
from scheduler.request import ChoiceTiming
from scheduler.stats import FinishedChoice, StepRecord
from server.tracing.trace import RequestTrace, new_span_id, new_trace_id

NOTHING = KVCacheStats(1, 1, 0, 0, 0, 0)


def timing(**changes: Any) -> ChoiceTiming:
    """Arrived at 10, scheduled at 11, first token at 13, last at 17: five tokens, two drafts."""
    numbers: dict[str, Any] = {
        "arrival_time": 10.0,
        "first_scheduled_time": 11.0,
        "first_token_time": 13.0,
        "last_token_time": 17.0,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 4,
        "num_output_tokens": 5,
        "num_spec_steps": 2,
        "num_drafted": 4,
        "num_accepted": 3,
        "acceptance_histogram": (0, 1, 1),
    }
    return ChoiceTiming(**{**numbers, **changes})


def finished(request_id: str = "cmpl-1-0", index: int = 0, **changes: Any) -> FinishedChoice:
    fields: dict[str, Any] = {
        "finish_reason": "length",
        "timing": timing(),
        "finish_time": 17.0,
        "last_of_request": True,
    }
    return FinishedChoice(request_id, index, **{**fields, **changes})


def trace(**changes: Any) -> RequestTrace:
    """Of a completion that went well."""
    fields: dict[str, Any] = {
        "operation": "text_completion",
        "route": "/v1/completions",
        "request_id": "r1",
        "arrival_time": 10.0,
        "parent": None,
        "trace_id": new_trace_id(),
        "span_id": new_span_id(),
        "model": "tiny",
        "answer_id": "cmpl-1",
        "num_prompt_tokens": 7,
        "finished": [finished()],
        "status": 200,
        "complete": True,
        "end_time": 17.5,
    }
    return RequestTrace(**{**fields, **changes})


def record(*ends: FinishedChoice) -> StepRecord:
    return StepRecord(
        step=None,
        step_seconds=0.0,
        overhead_seconds=0.0,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        num_running=0,
        num_waiting=0,
        num_preemptions=0,
        kv=NOTHING,
        prefix_queries=0,
        prefix_hits=0,
        num_prompt_tokens=0,
        num_generation_tokens=0,
        sequences=(),
        first_token_seconds=(),
        inter_token_seconds=(),
        finished=ends,
    )
