"""What a request is told of its own speculation, and what the server tells of its drafters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, metric, sse_events

REPEATS = {
    "model": MODEL_NAME,
    "prompt": "0 1 2 0 1 2 0 1 2 0 1",
    "temperature": 0,
    "max_tokens": 40,
    "allowed_token_ids": [70, 71, 72],
    "ignore_eos": True,
    "speculation": {"num_speculative_tokens": 3},
}


def report(http: httpx.Client, stream: bool = False, **change: Any) -> Any:
    body = {**REPEATS, **change}
    if not stream:
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        metrics = response.json()["metrics"]
    else:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        metrics = sse_events(http.post("/v1/completions", json=body).content)[-1]["metrics"]
    return None if metrics is None else metrics["speculative_decoding"]  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("per_step", [False, True], ids=["summary", "each step"])
def test_the_report_adds_up(http: httpx.Client, stream: bool, per_step: bool) -> None:
    spec = report(http, stream, return_token_ids=per_step)
    assert list(spec) == [
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
        "per_step_accepted",
        "per_step_drafted",
    ]
    histogram, steps = spec["acceptance_histogram"], spec["num_spec_steps"]
    accepted, drafted = spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]
    assert spec["num_spec_tokens"] == 3
    assert len(histogram) == 4
    assert sum(histogram) == steps > 0
    assert 0 < accepted == sum(i * count for i, count in enumerate(histogram)) <= drafted
    assert spec["mean_acceptance_length"] == pytest.approx(1 + accepted / steps, abs=1e-5)
    assert spec["draft_acceptance_rate"] == pytest.approx(accepted / drafted, abs=1e-5)
    if not per_step:
        assert spec["per_step_accepted"] is spec["per_step_drafted"] is None
        return
    assert len(spec["per_step_accepted"]) == len(spec["per_step_drafted"]) == steps
    assert [spec["per_step_accepted"].count(i) for i in range(4)] == histogram
    assert sum(spec["per_step_drafted"]) == drafted
    assert all(a <= d for a, d in zip(spec["per_step_accepted"], spec["per_step_drafted"], strict=True))


def test_a_request_that_drafted_nothing_has_numbers_all_the_same(http: httpx.Client) -> None:
    """A reader that wants numbers (AIPerf) drops a report with a null."""
    spec = report(http, max_tokens=1)
    assert (spec["mean_acceptance_length"], spec["draft_acceptance_rate"]) == (1.0, 0.0)
    assert spec["acceptance_histogram"] == [0, 0, 0, 0]
    assert spec["num_spec_steps"] == spec["num_draft_tokens"] == 0


def test_there_is_no_report_without_speculation_or_for_several_choices(http: httpx.Client) -> None:
    assert report(http, speculation={"num_speculative_tokens": 0}) is None
    assert report(http, n=2) is None


def test_every_drafter_that_the_server_lists_may_be_asked_for_and_changes_no_answer(http: httpx.Client) -> None:
    listed = [drafter["name"] for drafter in http.get("/v1/server_info").json()["speculation"]["drafters"]]
    assert listed
    plain = http.post("/v1/completions", json={**REPEATS, "speculation": {"num_speculative_tokens": 0}}).json()
    for name in listed:
        answer = http.post("/v1/completions", json={**REPEATS, "speculation": {"drafter": name}})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain["choices"]
    refused = http.post("/v1/completions", json={**REPEATS, "speculation": {"drafter": "oracle"}}).json()["error"]
    assert refused["param"] == "speculation.drafter"
    assert all(name in refused["message"] for name in listed)


def test_the_metrics_tell_who_drafted_and_what_is_held(http: httpx.Client, base: str) -> None:
    for name in ("ngram", "suffix"):
        drafted = metric(base, "spec_decode_drafter_draft_tokens_total", drafter=name)
        spec = report(http, speculation={"num_speculative_tokens": 3, "drafter": name})
        after = metric(base, "spec_decode_drafter_draft_tokens_total", drafter=name)
        assert after == drafted + spec["num_draft_tokens"] > drafted
    for what in ("drafts", "draft_tokens", "accepted_tokens"):
        assert metric(base, f"spec_decode_drafter_{what}_total") == metric(base, f"spec_decode_num_{what}_total")
    assert metric(base, "spec_decode_num_speculative_tokens_sum") == metric(base, "spec_decode_num_draft_tokens_total")
    told = {drafter["name"]: drafter for drafter in http.get("/v1/server_info").json()["speculation"]["drafters"]}
    most = told["suffix"]["max_memory_bytes"]
    assert 0 < told["suffix"]["memory_bytes"] <= most
    assert 0 < metric(base, "drafter_memory_bytes", drafter="suffix") <= most


def test_what_was_expected_of_steps_stands_beside_what_came(http: httpx.Client, base: str) -> None:
    report(http)
    for name in ("tokens", "step_seconds"):
        assert metric(base, f"spec_decode_expected_{name}_total") > 0
        assert metric(base, f"spec_decode_measured_{name}_total") > 0
    assert metric(base, "spec_decode_expected_speedup") > 0
    assert metric(base, "spec_decode_plain_seconds_total") > 0
    points = http.get("/v1/server_info").json()["speculation"]["step_seconds"]
    rows = [point["rows"] for point in points]
    assert rows == sorted(rows)
    assert all(point["seconds"] > 0 for point in points)


def test_the_server_tells_its_drafters_and_what_they_and_its_steps_cost(http: httpx.Client, service: Service) -> None:
    told = http.get("/v1/server_info").json()["speculation"]
    assert list(told) == ["num_speculative_tokens", "drafter", "drafters", "step_seconds"]
    assert told["num_speculative_tokens"] == service.settings.num_speculative_tokens
    assert told["drafter"] == service.settings.drafter
    assert [drafter["name"] for drafter in told["drafters"]] == list(service.facts.drafters)
    assert told["drafter"] in service.facts.drafters
    for drafter in told["drafters"]:
        assert list(drafter) == ["name", "memory_bytes", "max_memory_bytes", "round_seconds"]


def test_a_drafter_that_runs_a_model_tells_what_a_round_takes(tiny_model: Path, model_home: Path) -> None:
    service = build_service(tiny_model, model_home, exit_layers=1, num_blocks=16)
    told = {drafter["name"]: drafter for drafter in service.speculation_info["drafters"]}
    assert [point["rows"] for point in told["exit"]["round_seconds"]] == [1, 8, 32]
    seconds = [point["seconds"] for point in told["exit"]["round_seconds"]]
    assert 0 < seconds[0] <= seconds[1] <= seconds[2]
    assert told["ngram"]["round_seconds"] is told["suffix"]["round_seconds"] is None


def test_costs_are_read_when_they_are_asked_for(http: httpx.Client, service: Service) -> None:
    before = service.speculation
    seconds = [0.5]
    drafter = {"memory_bytes": 7, "max_memory_bytes": 9, "round_seconds": None}
    name = service.facts.drafters[-1]
    try:
        service.speculation = lambda: {
            "drafters": [{"name": name, **drafter}, {"name": "not served", **drafter}],
            "step_seconds": [{"rows": 1, "seconds": seconds[0]}],
        }
        for expected in (0.5, 0.25):
            seconds[0] = expected
            told = http.get("/v1/server_info").json()["speculation"]
            assert told["step_seconds"] == [{"rows": 1, "seconds": expected}]
            assert told["drafters"][-1] == {"name": name, **drafter}
            assert len(told["drafters"]) == len(service.facts.drafters)
    finally:
        service.speculation = before
