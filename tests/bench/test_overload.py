"""The run over the bounds, small; and that its checks can fail."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.overload import ANSWERED, REFUSED, Run, check, judge, run_both
from tests.server.builders import MODEL_NAME, build_service, running, save_tiny_model

REQUESTS = 40
WHOLE = {"choices": [{"index": 0, "finish_reason": "stop"}]}
NOTHING = {"running": 0.0, "waiting": 0.0}


def test_over_the_bounds_nobody_is_lost_and_openais_client_is_answered_in_the_end(tmp_path: Path) -> None:
    service = build_service(
        save_tiny_model(tmp_path / "model"), tmp_path, max_num_seqs=4, max_waiting=8, max_waiting_tokens=1000
    )
    with running(service) as base:
        lines = asyncio.run(run_both(base, MODEL_NAME, REQUESTS))
    assert all(holds for holds, _ in lines), lines


def run(num_refusals: int = 0, **ends: int) -> Run:
    return Run(Counter(ends), num_refusals)


GOOD = run(4, **{ANSWERED: 6, REFUSED: 4}), run(3, **{ANSWERED: 10})


@pytest.mark.parametrize(
    ("once", "retried", "counted", "left", "wrong"),
    [
        (*GOOD, 7.0, NOTHING, set()),
        (run(4, **{ANSWERED: 5, REFUSED: 4}), GOOD[1], 7.0, NOTHING, {0}),
        (run(4, **{ANSWERED: 5, REFUSED: 4, "status 500": 1}), GOOD[1], 7.0, NOTHING, {0}),
        (run(0, **{ANSWERED: 10}), GOOD[1], 3.0, NOTHING, {1}),
        (GOOD[0], run(3, **{ANSWERED: 9, "InternalServerError: overloaded": 1}), 7.0, NOTHING, {2}),
        (*GOOD, 8.0, NOTHING, {3}),
        (*GOOD, 7.0, {"running": 0.0, "waiting": 1.0}, {4}),
    ],
)
def test_each_line_fails_for_what_it_is_about(
    once: Run, retried: Run, counted: float, left: dict[str, float], wrong: set[int]
) -> None:
    lines = check(once, retried, 10, counted, left)
    assert {i for i, (holds, _) in enumerate(lines) if not holds} == wrong


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("stream", "status", "headers", "content", "end"),
    [
        (False, 200, {}, json.dumps(WHOLE).encode(), ANSWERED),
        (True, 200, {}, event(WHOLE) + b"data: [DONE]\n\n", ANSWERED),
        (True, 200, {}, event(WHOLE), "a stream without an end"),
        (True, 200, {}, event({"error": {}}) + b"data: [DONE]\n\n", "an error in a stream"),
        (True, 200, {}, event({"choices": []}) + b"data: [DONE]\n\n", "an answer with the ends {}"),
        (False, 500, {}, b"{}", "status 500"),
        (False, 503, {"Retry-After": "2"}, b'{"error": {"code": "overloaded"}}', REFUSED),
        (False, 503, {}, b'{"error": {"code": "overloaded"}}', "a bare 503 overloaded"),
        (False, 503, {"Retry-After": "2"}, b'{"error": {"code": "engine_failed"}}', "a bare 503 engine_failed"),
    ],
)
def test_an_end_is_judged_by_what_came(
    stream: bool, status: int, headers: dict[str, str], content: bytes, end: str
) -> None:
    assert judge({"prompt": "a", "stream": stream}, status, httpx.Headers(headers), content) == end
