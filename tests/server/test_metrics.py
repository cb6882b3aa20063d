"""The metrics adapter, and what the endpoint serves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcache.manager import KVCacheStats
from scheduler.request import ChoiceTiming
from scheduler.stats import FinishedChoice, SequenceStep, StepRecord
from server.metrics import Metrics
from specdec.plan import StepStats

TIMING = ChoiceTiming(
    arrival_time=10.0,
    first_scheduled_time=10.5,
    first_token_time=11.0,
    last_token_time=13.0,
    num_prompt_tokens=7,
    num_cached_tokens=0,
    num_output_tokens=5,
)
RECORD = StepRecord(
    step=StepStats(
        num_rows=12,
        num_sequences=3,
        rollback_tokens=3,
        blocks_trimmed=1,
        stage_seconds={"draft": 0.001, "verify": 0.02, "unheard_of": 1.0},
        build_seconds={"positions": 0.00002, "slots": 0.00003, "block_tables": 0.00004, "mask": 0.0, "unheard_of": 1.0},
        num_emitted=6,
        expected_tokens=5.0,
        expected_seconds=0.04,
        expected_speedup=1.5,
    ),
    step_seconds=0.03,
    overhead_seconds=0.001,
    num_prefill_tokens=4,
    num_decode_tokens=2,
    num_running=3,
    num_waiting=2,
    num_preemptions=1,
    kv=KVCacheStats(
        num_blocks=10,
        free_blocks=4,
        cached_blocks=2,
        used_blocks=4,
        prefix_queries=0,
        prefix_hits=0,
        block_size=4,
        used_slots=11,
        last_block_slots=1,
    ),
    prefix_queries=20,
    prefix_hits=5,
    num_prompt_tokens=7,
    num_generation_tokens=6,
    sequences=(SequenceStep(3, 4, 4, 2, "ngram"), SequenceStep(1, 4, 1, 0, "suffix"), SequenceStep(2, 4, 0, 0)),
    first_token_seconds=(0.3,),
    inter_token_seconds=(0.02, 0.03),
    finished=(
        FinishedChoice("r", 0, "stop", TIMING, 13.5, last_of_request=True),
        FinishedChoice("s", 0, "abort", TIMING, 13.5, last_of_request=True),
    ),
)


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name.removeprefix("truedraft_"), frozenset(labels.items())] = sample.value
    return found


def test_the_start_of_a_server_is_told_and_stays() -> None:
    metrics = Metrics(model_name="m", max_speculative_tokens=4, wall_clock=iter([1000.0, 2000.0]).__next__)
    for _ in range(2):
        told = samples(metrics.render().decode())
        assert [value for (name, _), value in told.items() if "start_time" in name] == [1000.0]
        metrics.observe(RECORD)


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("num_requests_running", {}, 3),
        ("num_requests_waiting", {}, 2),
        ("kv_cache_usage_perc", {}, 0.4),
        ("kv_blocks", {"state": "free"}, 4),
        ("kv_blocks", {"state": "cached"}, 2),
        ("kv_slot_steps_total", {"state": "used"}, 22),
        ("kv_slot_steps_total", {"state": "last_block"}, 2),
        ("kv_slot_steps_total", {"state": "reserved"}, 8),  # 4 blocks of 4 slots each time: what is neither
        ("kv_slot_steps_total", {"state": "draft"}, 8),  # one block trimmed each time
        ("kv_fragmentation_ratio", {}, 0.3125),
        ("prompt_tokens_total", {}, 14),
        ("generation_tokens_total", {}, 12),
        ("num_preemptions_total", {}, 2),
        ("request_success_total", {"finished_reason": "stop"}, 2),
        ("request_success_total", {"finished_reason": "abort"}, 2),
        ("ended_generation_tokens_total", {"finished_reason": "stop"}, 10),
        ("ended_generation_tokens_total", {"finished_reason": "abort"}, 10),
        ("prefix_cache_queries_total", {}, 40),
        ("prefix_cache_hits_total", {}, 10),
        ("prefix_reuse_ratio", {}, 0.25),
        ("time_to_first_token_seconds_sum", {}, 0.6),
        ("inter_token_latency_seconds_count", {}, 4),
        ("request_time_per_output_token_seconds_sum", {}, 1.0),
        ("e2e_request_latency_seconds_sum", {}, 7.0),
        ("request_queue_time_seconds_sum", {}, 1.0),
        ("request_prefill_time_seconds_sum", {}, 1.0),
        ("request_decode_time_seconds_sum", {}, 4.0),
        ("iteration_tokens_total_sum", {}, 24),
        ("step_duration_seconds_sum", {"stage": "verify"}, 0.04),
        ("batch_build_seconds_sum", {"part": "slots"}, 0.00006),
        ("batch_build_seconds_sum", {"part": "mask"}, 0),
        ("batch_build_seconds_count", {"part": "mask"}, 2),
        ("spec_decode_num_drafts_total", {}, 4),
        ("spec_decode_num_draft_tokens_total", {}, 10),
        ("spec_decode_num_accepted_tokens_total", {}, 4),
        ("spec_decode_num_accepted_tokens_per_pos_total", {"position": "0"}, 2),
        ("spec_decode_num_accepted_tokens_per_pos_total", {"position": "1"}, 2),
        ("spec_decode_num_accepted_tokens_per_pos_total", {"position": "2"}, 0),
        ("spec_decode_acceptance_length_sum", {}, 8),
        ("spec_decode_acceptance_length_count", {}, 4),
        ("spec_decode_num_speculative_tokens_count", {}, 6),
        ("spec_decode_num_speculative_tokens_sum", {}, 10),  # what was verified, not what was allowed
        ("spec_decode_num_speculative_tokens_bucket", {"le": "0.0"}, 2),
        ("spec_decode_drafter_drafts_total", {"drafter": "ngram"}, 2),
        ("spec_decode_drafter_draft_tokens_total", {"drafter": "ngram"}, 8),
        ("spec_decode_drafter_accepted_tokens_total", {"drafter": "ngram"}, 4),
        ("spec_decode_drafter_draft_tokens_total", {"drafter": "suffix"}, 2),
        ("spec_decode_drafter_accepted_tokens_total", {"drafter": "suffix"}, 0),
        ("spec_decode_expected_speedup", {}, 1.5),
        ("spec_decode_expected_tokens_total", {}, 10),
        ("spec_decode_measured_tokens_total", {}, 12),
        ("spec_decode_expected_step_seconds_total", {}, 0.08),
        ("spec_decode_measured_step_seconds_total", {}, 2.04),
        ("spec_decode_measured_draft_seconds_total", {}, 0.002),
        ("spec_decode_plain_seconds_total", {}, 12 / (5.0 / 0.04 / 1.5)),
        ("spec_decode_rollback_tokens_total", {}, 6),
        ("kv_blocks_trimmed_total", {}, 2),
        ("kv_blocks_moved_total", {}, 0),
        ("kv_alignment_bytes_moved_total", {}, 0),
        ("exactness_level", {}, 0),
        ("admission_rejections_total", {"reason": "queue_full"}, 1),
        ("http_responses_total", {"code": "200"}, 0),
        ("http_responses_total", {"code": "418"}, 1),
    ],
)
def test_two_equal_records_are_counted_twice(name: str, labels: dict[str, str], value: float) -> None:
    metrics = Metrics(
        model_name="m", max_speculative_tokens=4, exactness_level=0, drafters=("ngram", "suffix", "model")
    )
    metrics.observe(RECORD)
    metrics.observe(RECORD)
    metrics.reject("queue_full")
    metrics.count_response(418)
    assert samples(metrics.render().decode())[name, frozenset(labels.items())] == pytest.approx(value)


def test_counts_by_drafter_add_up_to_all() -> None:
    metrics = Metrics(model_name="m", max_speculative_tokens=4, drafters=("ngram", "suffix", "model"))
    metrics.observe(RECORD)
    found = samples(metrics.render().decode())
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        by_drafter = [value for (sample, _), value in found.items() if sample == f"spec_decode_drafter_{name}_total"]
        assert len(by_drafter) == 3
        assert sum(by_drafter) == found[f"spec_decode_num_{name}_total", frozenset()]


def test_the_measured_gain_is_the_expected_one_where_all_came_as_expected() -> None:
    metrics = Metrics(model_name="m", max_speculative_tokens=4)
    came = StepStats(
        num_emitted=6, stage_seconds={"verify": 0.04}, expected_tokens=6, expected_seconds=0.04, expected_speedup=1.5
    )
    metrics.observe(replace(RECORD, step=came))
    found = samples(metrics.render().decode())
    measured = found["spec_decode_measured_step_seconds_total", frozenset()]
    assert found["spec_decode_plain_seconds_total", frozenset()] / measured == pytest.approx(1.5)
    assert found["spec_decode_measured_tokens_total", frozenset()] == 6


@pytest.mark.parametrize(
    "change",
    [
        {"expected_tokens": None, "expected_seconds": None, "expected_speedup": None},  # no controller
        {"num_emitted": 0},  # only prompts were computed
    ],
    ids=str,
)
def test_a_step_of_which_nothing_is_expected_is_not_compared(change: dict[str, Any]) -> None:
    metrics = Metrics(model_name="m", max_speculative_tokens=4)
    assert RECORD.step is not None
    metrics.observe(replace(RECORD, step=replace(RECORD.step, **change)))
    found = samples(metrics.render().decode())
    assert math.isnan(found["spec_decode_expected_speedup", frozenset()])
    names = ("expected_tokens", "measured_tokens", "expected_step_seconds", "measured_step_seconds", "plain_seconds")
    assert all(found[f"spec_decode_{name}_total", frozenset()] == 0 for name in names)


def test_what_drafters_hold_is_read_when_the_metrics_are() -> None:
    held = [100]
    metrics = Metrics(model_name="m", max_speculative_tokens=4, drafter_memory={"suffix": lambda: held[0]})
    name = ("drafter_memory_bytes", frozenset({("drafter", "suffix")}))
    assert samples(metrics.render().decode())[name] == 100
    held[0] = 250
    assert samples(metrics.render().decode())[name] == 250


def test_a_metric_that_cannot_be_read_is_said_once_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> float:
        raise RuntimeError("planted")

    metrics = Metrics(model_name="m", max_speculative_tokens=4, drafter_memory={"suffix": fail})
    for _ in range(2):
        found = samples(metrics.render().decode())
        assert math.isnan(found["drafter_memory_bytes", frozenset({("drafter", "suffix")})])
        assert found["num_requests_running", frozenset()] == 0
    assert [record.getMessage() for record in caplog.records] == ["a metric cannot be read"]


def test_who_waits_and_a_step_that_hangs_grow_older_between_two_looks() -> None:
    now, arrival = [100.0], [None, 90.0]
    metrics = Metrics(model_name="m", max_speculative_tokens=4, clock=lambda: now[0])
    metrics.watch_engine(
        ready=lambda: True, healthy=lambda: False, step_age=lambda: now[0] - 95, oldest_arrival=lambda: arrival[-1]
    )

    def look(name: str) -> float:
        return samples(metrics.render().decode())[name, frozenset()]

    assert (look("ready"), look("engine_healthy")) == (1, 0)
    assert (look("oldest_waiting_seconds"), look("engine_step_age_seconds")) == (10, 5)
    now[0] = 103.0
    assert (look("oldest_waiting_seconds"), look("engine_step_age_seconds")) == (13, 8)
    arrival.pop()
    assert look("oldest_waiting_seconds") == 0


def test_aborted_requests_have_no_latency() -> None:
    metrics = Metrics(model_name="m", max_speculative_tokens=4)
    metrics.observe(RECORD)
    assert samples(metrics.render().decode())["e2e_request_latency_seconds_count", frozenset()] == 1


def test_two_services_in_one_process_do_not_share_numbers() -> None:
    one, other = (Metrics(model_name="m", max_speculative_tokens=4) for _ in range(2))
    one.observe(RECORD)
    assert samples(other.render().decode())["generation_tokens_total", frozenset()] == 0


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"])
@pytest.mark.case("L 26516")
def test_the_endpoint_serves_the_text_format_whatever_is_asked_for(http: httpx.Client, accept: str) -> None:
    response = http.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(response.text))
    assert len(families) > 30
    for family in families:
        assert family.name.startswith("truedraft_")
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["engine"] == "0"
            assert sample.labels["model_name"] == "tiny"


def test_no_label_comes_from_a_request(http: httpx.Client) -> None:
    marked = {"user": "label-user", "cache_salt": "label-salt", "prompt": "label-prompt", "model": "label-model"}
    http.post("/v1/completions", json={**marked, "max_tokens": 1})
    http.post(
        "/v1/completions", json={**marked, "model": "tiny", "max_tokens": 1}, headers={"X-Request-Id": "label-id"}
    )
    http.get("/label-path")
    assert "label-" not in http.get("/metrics").text
