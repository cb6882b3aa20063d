"""What /metrics says is what the schema says: names, kinds, labels, buckets and help texts."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from scheduler import errors
from server.metrics import PREFIX, REJECTIONS, SCHEMA, Metrics
from server.metrics.kinds import Metric
from server.metrics.labels import HTTP_CODES
from server.metrics.schema import GROUPS, label_values
from server.tracing.tracing import TRACE_RESULTS
from specdec.drafters.registry import DRAFTER_NAMES
from tests.server.test_metrics import RECORD

K = 3
# Those that a server has only if it was told to; each says so in the docs.
OPTIONAL = {"equivalence_audits_enabled", "drafter_memory_bytes", "traces_total"}

COMMON = {"model_name", "engine"}
# Agreed with those who read them: dashboards, autoscalers, load tests. A change here breaks theirs.
CONTRACT: dict[str, tuple[str, set[str]]] = {
    "num_requests_running": ("gauge", set()),
    "num_requests_waiting": ("gauge", set()),
    "oldest_waiting_seconds": ("gauge", set()),
    "kv_cache_usage_perc": ("gauge", set()),
    "cache_config_info": ("gauge", {"block_size", "num_blocks", "enable_prefix_cache", "cache_dtype"}),
    "prompt_tokens_total": ("counter", set()),
    "generation_tokens_total": ("counter", set()),
    "request_success_total": ("counter", {"finished_reason"}),
    "num_preemptions_total": ("counter", set()),
    "admission_rejections_total": ("counter", {"reason"}),
    "time_to_first_token_seconds": ("histogram", set()),
    "inter_token_latency_seconds": ("histogram", set()),
    "request_time_per_output_token_seconds": ("histogram", set()),
    "e2e_request_latency_seconds": ("histogram", set()),
    "request_queue_time_seconds": ("histogram", set()),
    "request_prefill_time_seconds": ("histogram", set()),
    "request_decode_time_seconds": ("histogram", set()),
    "iteration_tokens_total": ("histogram", set()),
    "step_duration_seconds": ("histogram", {"stage"}),
    "spec_decode_num_drafts_total": ("counter", set()),
    "spec_decode_num_draft_tokens_total": ("counter", set()),
    "spec_decode_num_accepted_tokens_total": ("counter", set()),
    "spec_decode_num_accepted_tokens_per_pos_total": ("counter", {"position"}),
    "spec_decode_acceptance_length": ("histogram", set()),
    "spec_decode_rollback_tokens_total": ("counter", set()),
    "kv_blocks_trimmed_total": ("counter", set()),
    "kv_blocks_moved_total": ("counter", set()),
    "kv_alignment_bytes_moved_total": ("counter", set()),
    "kv_fragmentation_ratio": ("gauge", set()),
    "kv_blocks": ("gauge", {"state"}),
    "kv_slot_steps_total": ("counter", {"state"}),
    "prefix_cache_queries_total": ("counter", set()),
    "prefix_cache_hits_total": ("counter", set()),
    "prefix_reuse_ratio": ("gauge", set()),
    "batch_build_seconds": ("histogram", {"part"}),
    "spec_decode_num_speculative_tokens": ("histogram", set()),
    "spec_decode_expected_speedup": ("gauge", set()),
    "equivalence_audits_total": ("counter", {"result"}),
    "exactness_level": ("gauge", set()),
}
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
ITL = ".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
LATENCY = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
BUCKETS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": ITL,
    "request_time_per_output_token_seconds": ITL,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "spec_decode_acceptance_length": "1 2 3 4",
    "spec_decode_num_speculative_tokens": "0 1 2 3",
}
WORDS = {
    ("step_duration_seconds", "stage"): {"draft", "verify", "accept", "rollback", "sync", "build"},
    ("batch_build_seconds", "part"): {"positions", "slots", "block_tables", "mask"},
    ("kv_blocks", "state"): {"free", "used", "cached"},
    ("kv_slot_steps_total", "state"): {"used", "last_block", "reserved", "draft"},
    ("equivalence_audits_total", "result"): {"match", "near_tie", "mismatch", "dropped"},
    ("request_success_total", "finished_reason"): {"stop", "length", "abort", "error"},
}


def full() -> Metrics:
    """With everything that a server can have, and a step behind it."""
    metrics = Metrics(
        model_name="m",
        max_speculative_tokens=K,
        exactness_level=0,
        audits=True,
        cache_config={"block_size": 16, "num_blocks": 64, "enable_prefix_cache": True, "cache_dtype": "bfloat16"},
        drafters=DRAFTER_NAMES,
        drafter_memory={"suffix": lambda: 7.0},
        build={"version": "1", "executor": "fused/torch", "exactness": "L0", "system_fingerprint": "fp"},
    )
    metrics.watch_engine(ready=lambda: True, healthy=lambda: True, step_age=lambda: 0.0, oldest_arrival=lambda: None)
    metrics.watch("log_lines_dropped", lambda: 0.0)
    for result in TRACE_RESULTS:
        metrics.watch("traces", lambda: 0.0, result)
    metrics.observe(RECORD)
    return metrics


def families(text: str) -> dict[str, Family]:
    """As a scraper reads them, by the names in the text and without our prefix."""
    found = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name.removeprefix(PREFIX)] = family
    return found


@pytest.fixture(scope="module")
def shown() -> dict[str, Family]:
    return families(full().render().decode())


@pytest.mark.case("L 26516")
def test_a_server_with_everything_tells_every_metric_of_the_schema_in_its_order(shown: dict[str, Family]) -> None:
    assert list(shown) == [metric.shown_name for metric in SCHEMA.values()]


@pytest.mark.parametrize("metric", SCHEMA.values(), ids=lambda metric: metric.name)
def test_each_is_told_as_the_schema_has_it(metric: Metric, shown: dict[str, Family]) -> None:
    family, known = shown[metric.shown_name], label_values()
    assert (family.type, family.documentation) == (metric.kind, metric.help)
    assert {sample.name for sample in family.samples} == set(metric.sample_names)
    for sample in family.samples:
        labels = known[sample.name]
        assert list(sample.labels) == sorted(labels)
        for name, words in labels.items():
            assert not words or sample.labels[name] in words
    for label in metric.labels:
        if label.values:
            assert {sample.labels[label.name] for sample in family.samples} == set(label.values)
    if metric.kind == "histogram":
        bounds = {float(sample.labels["le"]) for sample in family.samples if "le" in sample.labels}
        assert bounds == {*metric.bounds(K), float("inf")}


@pytest.mark.parametrize("metric", SCHEMA.values(), ids=lambda metric: metric.name)
def test_each_says_what_it_is_what_to_ask_and_when_to_worry(metric: Metric) -> None:
    assert "\n" not in metric.help
    assert metric.help.endswith(".")
    assert metric.worry.endswith(".")
    assert metric.unit
    assert not metric.name.startswith(PREFIX)
    assert metric.kind == "histogram" or not metric.buckets
    assert any(name in metric.query for name in metric.sample_names)


def test_buckets_rise() -> None:
    for metric in SCHEMA.values():
        bounds = metric.bounds(K)
        assert (metric.kind == "histogram") == bool(bounds)
        assert all(low < high for low, high in pairwise(bounds))


def test_no_name_is_taken_twice() -> None:
    assert sum(len(group.metrics) for group in GROUPS) == len(SCHEMA)
    samples = [name for metric in SCHEMA.values() for name in metric.sample_names]
    assert len(set(samples)) == len(samples)


@pytest.mark.parametrize("name", CONTRACT)
def test_what_was_agreed_is_kept(name: str, shown: dict[str, Family]) -> None:
    kind, labels = CONTRACT[name]
    family = shown[name]
    assert family.type == kind
    for sample in family.samples:
        assert set(sample.labels) - {"le"} == COMMON | labels


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_are_those_that_were_agreed(name: str, shown: dict[str, Family]) -> None:
    bounds = [sample.labels["le"] for sample in shown[name].samples if sample.name.endswith("_bucket")]
    assert [float(bound) for bound in bounds] == [float(bound) for bound in BUCKETS[name].split()] + [float("inf")]


@pytest.mark.parametrize(("name", "label"), WORDS)
def test_a_label_has_the_words_that_were_agreed(name: str, label: str, shown: dict[str, Family]) -> None:
    assert {sample.labels[label] for sample in shown[name].samples} == WORDS[name, label]


def test_every_reason_of_a_refusal_is_a_word_of_the_label() -> None:
    fixed = {value.reason for value in vars(errors).values() if isinstance(value, type)} - {"refused"}
    assert fixed <= set(REJECTIONS)
    assert all(code.isdigit() for code in HTTP_CODES)


def test_a_live_server_tells_the_schema_but_for_what_it_was_not_told_to_have(http: httpx.Client) -> None:
    found = families(http.get("/metrics").text)
    assert {metric.shown_name for metric in SCHEMA.values()} - set(found) <= OPTIONAL
    assert set(found) <= {metric.shown_name for metric in SCHEMA.values()}
    for metric in SCHEMA.values():
        if metric.shown_name in found:
            family = found[metric.shown_name]
            assert (family.type, family.documentation) == (metric.kind, metric.help)
    assert all(SCHEMA[name.removesuffix("_total")].absent for name in OPTIONAL)


def test_no_series_has_the_name_of_what_prometheus_clients_add(http: httpx.Client) -> None:
    assert "_created" not in http.get("/metrics").text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt-get install prometheus)")
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    queries = {
        f"query:{metric.name}:{i}": query for metric in SCHEMA.values() for i, query in enumerate(queries_of(metric))
    }
    assert len(queries) > len(SCHEMA)
    rules = [{"record": name, "expr": query} for name, query in queries.items()]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "docs", "rules": rules}]}), "utf-8")
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def queries_of(metric: Metric) -> list[str]:
    """A query goes on in lines that begin with a space."""
    found: list[str] = []
    for line in metric.query.splitlines():
        if line.startswith("#"):
            continue
        if line.startswith(" ") and found:
            found[-1] += line
        else:
            found.append(line)
    return found
