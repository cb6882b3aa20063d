"""The arithmetic of the client's side, against numbers worked out by hand."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from bench.serving.figures import client_figures, is_good, outcome_figures, percentile, summary
from bench.serving.loops import LoadResult, arrivals
from bench.serving.options import Slo
from bench.serving.trace import FAILED, OK, REFUSED, Trace

# Of the result of `vllm bench serve` (vllm/benchmarks/serve.py), without what it keeps for itself.
VLLM_FIELDS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}  # fmt: skip


def trace(planned: float, *chunks: tuple[float, int], outcome: str = OK, late: float = 0.0) -> Trace:
    made = Trace("p", planned, sent=planned + late, ended=chunks[-1][0] if chunks else planned, outcome=outcome)
    made.chunks = list(chunks)
    made.usage = {"prompt_tokens": 10, "completion_tokens": sum(tokens for _, tokens in chunks)}
    return made


ONE = trace(1.0, (1.5, 1), (1.6, 3), (1.9, 1))
TWO = trace(1.0, (2.0, 2), late=0.25)


def test_percentiles_are_linear_between_ranks() -> None:
    # ranks 0..4: p90 lies at 3.6, so 4 + 0.6 (5 - 4)
    assert percentile([3, 1, 2, 5, 4], 90) == pytest.approx(4.6)
    assert percentile([1, 2], 50) == pytest.approx(1.5)
    assert percentile([7], 99) == 7
    assert percentile([], 50) is None


def test_a_summary_is_in_milliseconds() -> None:
    found = summary([0.1, 0.2, 0.3, 0.6], "ttft")
    assert found["mean_ttft_ms"] == pytest.approx(300)
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(250)
    assert found["std_ttft_ms"] == pytest.approx(1e3 * statistics.pstdev([0.1, 0.2, 0.3, 0.6]))
    assert found["p90_ttft_ms"] == pytest.approx(510)  # rank 2.7: 300 + 0.7 * 300
    assert set(summary([], "itl").values()) == {None}


def test_times_are_one_for_each_request_and_one_for_each_gap() -> None:
    assert ONE.ttft == pytest.approx(0.5)
    assert ONE.e2e == pytest.approx(0.9)
    assert ONE.gaps == [pytest.approx(0.1), pytest.approx(0.3)]  # three tokens came at once: one gap
    assert ONE.tpot == pytest.approx(0.4 / 4)
    assert trace(0.0, (1.0, 1)).tpot is None


def test_latencies_count_from_the_planned_arrival_however_late_a_request_was_sent() -> None:
    assert TWO.ttft == pytest.approx(1.0)
    assert TWO.late == pytest.approx(0.25)
    figures = client_figures([LoadResult([TWO], 1.0)], [])
    assert figures["p50_ttft_ms"] == figures["p50_e2el_ms"] == pytest.approx(1000)


def test_throughput_is_over_the_whole_duration_and_of_whole_answers_only() -> None:
    lost = trace(1.0, (1.2, 4), outcome=FAILED)
    figures = client_figures([LoadResult([ONE, TWO, lost], 2.0), LoadResult([TWO], 2.0)], [])
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["total_output_tokens"] == 5 + 2 + 2
    assert figures["total_input_tokens"] == 30
    assert figures["output_throughput"] == pytest.approx(9 / 4)
    assert figures["total_token_throughput"] == pytest.approx(39 / 4)
    assert figures["request_throughput"] == pytest.approx(3 / 4)
    assert figures["request_goodput"] is None
    assert figures["max_concurrent_requests"] == 2  # the third was over before TWO was sent
    assert figures["max_output_tokens_per_s"] == 5 + 0  # ONE's chunks in its first second; TWO's is in the next


def test_the_fields_are_those_of_vllm_and_percentiles_beside_them() -> None:
    figures = client_figures([LoadResult([ONE], 1.0)], [Slo("ttft", 1)])
    assert set(figures) >= VLLM_FIELDS
    extra = {f"p{q}_{name}_ms" for q in (50, 90) for name in ("ttft", "tpot", "itl", "e2el")}
    assert set(figures) - VLLM_FIELDS == extra


@pytest.mark.parametrize(
    ("slo", "good"),
    [("ttft", 499), ("tpot", 99), ("itl", 299), ("e2el", 899)],  # one millisecond below what ONE took
)
def test_a_request_is_good_within_every_objective(slo: str, good: float) -> None:
    assert not is_good(ONE, [Slo(slo, good)])
    assert is_good(ONE, [Slo(slo, good + 2)])
    assert not is_good(ONE, [Slo("ttft", 10_000), Slo(slo, good)])


def test_what_failed_is_never_good_and_counts_in_the_goodput() -> None:
    lost = trace(1.0, (1.1, 1), outcome=REFUSED)
    assert not is_good(lost, [Slo("ttft", 10_000)])
    run = LoadResult([ONE, TWO, lost], 2.0)
    assert client_figures([run], [Slo("ttft", 600)])["request_goodput"] == pytest.approx(1 / 2)
    assert outcome_figures(run.traces, [Slo("ttft", 600)])["good_share"] == pytest.approx(1 / 3)


def test_reasons_are_counted_by_kind() -> None:
    lost = [Trace("p", 0.0, outcome=REFUSED, reason="HTTP 503: busy"), Trace("p", 0.0, outcome=FAILED, reason="x")]
    found = outcome_figures([ONE, *lost, lost[1]], [])
    assert found["refused"] == {"HTTP 503: busy": 1}
    assert found["failures"] == {"x": 2}
    assert found["tokens_per_chunk"] == pytest.approx(5 / 3)


def test_nothing_at_all_has_no_figures_and_raises_nothing() -> None:
    figures = client_figures([], [])
    assert figures["p50_ttft_ms"] is None
    assert figures["output_throughput"] == 0


def test_arrivals_are_of_the_seed_alone_and_of_the_rate() -> None:
    times = arrivals(4.0, 4000, seed=3)
    assert times == arrivals(4.0, 4000, seed=3) != arrivals(4.0, 4000, seed=4)
    assert times[0] == 0
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.25, rel=0.1)  # of an exponential law: as large as its mean


def test_usage_wins_over_ids_and_ids_over_chunks() -> None:
    counted = Trace("p", 0.0)
    counted.take({"choices": [{"text": "ab", "token_ids": [1, 2]}]}, 1.0)
    counted.take({"choices": [{"text": "c", "token_ids": [3]}]}, 2.0)
    assert counted.num_tokens == 3
    counted.take({"choices": [], "usage": {"completion_tokens": 4}}, 2.5)
    assert counted.num_tokens == 4
    by_chunks = Trace("p", 0.0)
    by_chunks.take({"choices": [{"delta": {"content": "x"}}]}, 1.0)
    by_chunks.take({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.5)
    assert by_chunks.num_tokens == 1


def test_the_best_second_is_found_wherever_it_lies() -> None:
    rng = random.Random(0)
    chunks = sorted((10 + rng.random() * 5, 2) for _ in range(50))
    seconds = [sum(n for t, n in chunks if s <= t - 10 < s + 1) for s in range(5)]
    found = client_figures([LoadResult([trace(10.0, *chunks)], 5.0)], [])
    assert found["max_output_tokens_per_s"] == max(seconds)
