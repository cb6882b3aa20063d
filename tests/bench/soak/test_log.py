"""What is read out of the log of the server under test."""

from __future__ import annotations

import json
from typing import Any

from bench.soak.log import read_log


def record(**fields: Any) -> str:
    return json.dumps({"level": "info", "logger": "truedraft.access", "message": "POST /v1/completions 200", **fields})


def test_tokens_and_statuses_are_told_by_request() -> None:
    log = read_log(
        [
            "truedraft: serving tiny",
            record(request_id="soak-1", status=200, completion_tokens=7),
            record(request_id="soak-2", status=503),
            '{"a": ',
        ]
    )
    assert log.tokens == {"soak-1": 7}
    assert log.statuses == {"soak-1": 200, "soak-2": 503}
    assert log.errors == log.twice == []


def test_a_request_that_is_told_twice_is_named() -> None:
    lines = [record(request_id="soak-1", status=200, completion_tokens=count) for count in (3, 4)]
    assert read_log(lines).twice == ["soak-1"]
    assert read_log(lines).tokens == {"soak-1": 7}


def test_errors_that_were_asked_for_are_told_from_others() -> None:
    trace = "Traceback (most recent call last):\n  ...\n{}: no"
    lines = [
        record(level="error", logger="scheduler", message="failed", exception=trace.format("bench...InjectedFault")),
        record(level="error", logger="scheduler", message="failed", exception=trace.format("KeyError")),
        record(level="warning", logger="scheduler", message="KeyError"),
    ]
    log = read_log(lines)
    assert log.num_injected == 1
    assert log.errors == ["scheduler: failed KeyError: no"]
