"""``--metrics-alias vllm``: what vLLM has too, told under its names, with its kinds and labels."""

from __future__ import annotations

from typing import Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import Metrics
from tests.server.test_metrics import RECORD

# As vLLM's own server tells them (v1, 0.2x): kind, and labels beyond model_name and engine.
VLLM: dict[str, tuple[str, set[str]]] = {
    "vllm:num_requests_running": ("gauge", set()),
    "vllm:num_requests_waiting": ("gauge", set()),
    "vllm:kv_cache_usage_perc": ("gauge", set()),
    "vllm:prefix_cache_queries_total": ("counter", set()),
    "vllm:prefix_cache_hits_total": ("counter", set()),
    "vllm:num_preemptions_total": ("counter", set()),
    "vllm:prompt_tokens_total": ("counter", set()),
    "vllm:generation_tokens_total": ("counter", set()),
    "vllm:request_success_total": ("counter", {"finished_reason"}),
    "vllm:iteration_tokens_total": ("histogram", set()),
    "vllm:time_to_first_token_seconds": ("histogram", set()),
    "vllm:inter_token_latency_seconds": ("histogram", set()),
    "vllm:request_time_per_output_token_seconds": ("histogram", set()),
    "vllm:e2e_request_latency_seconds": ("histogram", set()),
    "vllm:request_queue_time_seconds": ("histogram", set()),
    "vllm:request_prefill_time_seconds": ("histogram", set()),
    "vllm:request_decode_time_seconds": ("histogram", set()),
    "vllm:spec_decode_num_drafts_total": ("counter", set()),
    "vllm:spec_decode_num_draft_tokens_total": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens_total": ("counter", set()),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": ("counter", {"position"}),
}
CACHE_CONFIG = "vllm:cache_config_info"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def text(alias: Literal["none", "vllm"]) -> str:
    metrics = Metrics(
        model_name="m",
        max_speculative_tokens=3,
        alias=alias,
        wall_clock=lambda: 1000.0,
        cache_config={"block_size": 16, "num_blocks": 64, "enable_prefix_cache": True, "cache_dtype": "bfloat16"},
    )
    metrics.observe(RECORD)
    return metrics.render().decode()


def kinds(exposed: str) -> dict[str, str]:
    families = text_string_to_metric_families(exposed)
    return {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}


def samples(exposed: str, prefix: str) -> Samples:
    """By name without ``prefix`` and labels."""
    return {
        (sample.name.removeprefix(prefix), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposed)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }


def test_nothing_has_vllms_name_unless_it_is_asked_for() -> None:
    assert "vllm" not in text("none")
    ours = text("vllm").split("# HELP vllm:", 1)[0]
    assert ours == text("none")


@pytest.mark.parametrize("name", VLLM)
def test_each_has_vllms_kind_and_labels(name: str) -> None:
    kind, labels = VLLM[name]
    exposed = text("vllm")
    assert kinds(exposed)[name] == kind
    found = [dict(key) for (sample, key) in samples(exposed, "vllm:") if f"vllm:{sample}".startswith(name)]
    suffixed = [key for key in found if "le" in key]
    assert found
    assert bool(suffixed) == (kind == "histogram")
    if name != "vllm:spec_decode_num_accepted_tokens_total":  # the name of another begins like it
        assert all(set(key) - {"le"} == {"model_name", "engine"} | labels for key in found)


def test_there_is_no_other() -> None:
    assert {name for name in kinds(text("vllm")) if name.startswith("vllm:")} == {*VLLM, CACHE_CONFIG}


def test_the_numbers_are_ours() -> None:
    exposed = text("vllm")
    ours, theirs = samples(exposed, "truedraft_"), samples(exposed, "vllm:")
    shared = {key: value for key, value in theirs.items() if key[0] != "cache_config_info"}
    assert shared == {key: ours[key] for key in shared}
    assert any(value for value in shared.values())


def test_the_cache_is_described_in_vllms_words_for_whoever_computes_with_them() -> None:
    ((name, labels),) = [key for key in samples(text("vllm"), "vllm:") if key[0] == "cache_config_info"]
    assert name == "cache_config_info"
    assert dict(labels) == {
        "engine": "0",
        "block_size": "16",
        "num_gpu_blocks": "64",
        "kv_cache_size_tokens": "1024",
        "enable_prefix_caching": "True",
        "cache_dtype": "bfloat16",
    }
