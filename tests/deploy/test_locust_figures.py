"""The load test's figures: times, what counts, objectives, and the server's own account."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test.arrivals import Arrivals
from load_test.distribution import Distribution
from load_test.measurement import Measurement
from load_test.record import Record
from load_test.report import report_lines
from load_test.scrape import Scrape, Window
from load_test.slo import judge, parse_objectives
from load_test.tally import Tally

seconds = st.floats(1e-5, 1e4)


def distribution(values: list[float]) -> Distribution:
    made = Distribution()
    for value in values:
        made.add(value)
    return made


def ended(sent: float, *, tokens: int = 4, kind: str = "chat", outcome: str = "completed", late: float = 0.0) -> Record:
    """First token after 1 s, then one token a second."""
    times = [sent + 1.0 + i for i in range(tokens)] if outcome in ("completed", "cancelled") else []
    made = Record(kind=kind, intended=sent - late, sent=sent, outcome=outcome)  # type: ignore[arg-type]
    made.ended = (times or [sent + 0.5])[-1]
    if times:
        made.first, made.last, made.gaps = times[0], times[-1], [1.0] * (tokens - 1)
        made.num_tokens, made.num_chunks = tokens, tokens
    else:
        made.reason = "503 overloaded" if outcome == "shed" else "500"
    return made


# distributions


@given(st.lists(seconds, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_one_percent_of_the_nearest_rank(values: list[float], q: float) -> None:
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    assert distribution(values).quantile(q) == pytest.approx(exact, rel=0.01)


@given(st.lists(seconds, min_size=1, max_size=200))
def test_count_mean_and_extremes_are_exact(values: list[float]) -> None:
    made = distribution(values)
    assert (made.count, made.minimum, made.maximum) == (len(values), min(values), max(values))
    assert made.mean == pytest.approx(statistics.fmean(values))


@given(st.lists(seconds, max_size=50), st.lists(seconds, max_size=50))
def test_merged_distributions_are_those_of_all_values(first: list[float], second: list[float]) -> None:
    merged, whole = distribution(first), distribution(first + second)
    sent = json.loads(json.dumps(distribution(second).to_plain()))  # as a worker's report travels
    merged.merge(Distribution.from_plain(sent))
    assert merged.figures() == pytest.approx(whole.figures())
    assert merged.buckets == whole.buckets


def test_nothing_measured_is_null_and_zero_is_a_value() -> None:
    assert set(Distribution().figures().values()) == {0, None}
    assert distribution([0.0, 0.0]).quantile(0.5) == 0.0


# arrivals


@pytest.mark.parametrize(("kind", "spread"), [("poisson", 1.0), ("constant", 0.0)])
def test_arrivals_come_at_their_rate_with_the_spread_of_their_kind(kind: str, spread: float) -> None:
    arrivals = Arrivals(50.0, kind, random.Random(5), 100.0)
    times = [arrivals.take() for _ in range(20_000)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.pstdev(gaps) * 50 == pytest.approx(spread, abs=0.03)
    assert times[0] > 100.0


def test_what_is_due_is_what_was_announced() -> None:
    arrivals = Arrivals(3.0, "poisson", random.Random(2), 0.0)
    announced, due = zip(*((arrivals.next, arrivals.take()) for _ in range(20)), strict=True)
    assert announced == due


def test_sources_of_even_arrivals_are_not_in_step() -> None:
    first = {Arrivals(1.0, "constant", random.Random(i), 0.0).next for i in range(10)}
    assert len(first) == 10
    assert all(0 <= time < 1 for time in first)


@pytest.mark.parametrize(("rate", "kind"), [(0.0, "poisson"), (math.nan, "poisson"), (1.0, "bursty")])
def test_arrivals_that_cannot_be_are_refused(rate: float, kind: str) -> None:
    with pytest.raises(ValueError, match=r"rate must be positive|poisson or constant"):
        Arrivals(rate, kind, random.Random(0), 0.0)


# what counts


def test_a_run_adds_up() -> None:
    tally = Tally()
    for record in (ended(0.0), ended(1.0, tokens=2, outcome="cancelled"), ended(2.0, outcome="shed", late=0.25)):
        tally.add(record)
    tally.add(ended(10.0, outcome="failed"))
    figures = tally.figures()
    assert figures["requests"] == {"ended": 4, "completed": 1, "cancelled": 1, "shed": 1, "failed": 1}
    assert figures["reasons"] == {"shed: 503 overloaded": 1, "failed: 500": 1}
    assert figures["shares"] == {"shed": 0.25, "failed": 0.25, "cancelled": 0.25}
    assert figures["seconds"] == 10.5
    assert figures["tokens_per_second"] == pytest.approx(6 / 10.5)
    assert (figures["ttft"]["count"], figures["itl"]["count"]) == (2, 4)
    assert (figures["e2e"]["count"], figures["tpot"]["count"]) == (1, 1)
    assert figures["late"]["max"] == 0.25


def test_a_tally_survives_the_way_to_the_master() -> None:
    tally = Tally()
    tally.add(ended(0.0))
    tally.add(ended(2.0, outcome="shed"))
    assert Tally.from_plain(json.loads(json.dumps(tally.to_plain()))).figures() == tally.figures()


def test_requests_of_the_warm_up_do_not_count() -> None:
    measurement = Measurement()
    measurement.begin(100.0, warm_up=10.0)
    assert [measurement.add(ended(sent)) for sent in (101.0, 109.9, 110.0)] == [False, False, True]
    figures = measurement.figures()
    assert (figures["total"]["requests"]["ended"], figures["warm_up"]) == (1, {"completed": 2})


def test_a_request_that_was_cut_off_counts_nowhere_but_as_unfinished() -> None:
    measurement = Measurement()
    measurement.begin(0.0, 0.0)
    assert not measurement.add(Record(kind="chat", intended=1.0, sent=1.0, first=2.0, num_tokens=3))
    figures = measurement.figures()
    assert (figures["unfinished"], figures["total"]["tokens"]["output"]) == (1, 0)


def test_a_request_belongs_to_the_step_in_which_it_was_sent() -> None:
    measurement = Measurement()
    measurement.next_step(2, 99.9, warm_up=1.0)  # locust names the first step before the test begins
    measurement.begin(100.0, warm_up=1.0)
    measurement.next_step(8, 110.0, warm_up=1.0)
    counted = [measurement.add(ended(sent)) for sent in (100.5, 105.0, 109.9, 110.5, 112.0)]
    assert counted == [False, True, True, False, True]
    steps = measurement.figures()["steps"]
    assert [(step["users"], step["figures"]["requests"]["ended"]) for step in steps] == [(2, 2), (8, 1)]


def test_classes_and_steps_add_up_to_the_total_also_over_workers() -> None:
    master, worker = Measurement(), Measurement()
    for kind in ("chat", "code", "chat"):
        worker.add(ended(1.0, kind=kind))
    for _ in range(2):
        master.merge_plain(json.loads(json.dumps(worker.to_plain())))
    figures = master.figures()
    assert {kind: f["requests"]["ended"] for kind, f in figures["classes"].items()} == {"chat": 4, "code": 2}
    assert figures["total"]["requests"]["ended"] == 6
    assert figures["total"]["tokens_per_second"] == pytest.approx(24 / 4)  # side by side, not one after the other


# objectives


def figures_of(*records: Record) -> dict[str, Any]:
    tally = Tally()
    for record in records:
        tally.add(record)
    return tally.figures()


@pytest.mark.parametrize(
    ("objective", "met"),
    [
        ("ttft_p95<1.5", True),
        ("ttft_max < 1", False),
        ("itl_mean>0.5", True),
        ("e2e_p50<4.1", True),
        ("tpot_p99<0.5", False),
        ("late_max<0.1", True),
        ("failed<0.001", True),
        ("shed<0.5", False),
        ("cancelled<0.5", True),
        ("tokens_per_second>0.5", True),
        ("requests_per_second>1e3", False),
        ("acceptance_length>1", False),  # not measured
    ],
)
def test_an_objective_is_met_strictly_and_only_by_what_was_measured(objective: str, met: bool) -> None:
    figures = figures_of(ended(0.0), ended(0.0, outcome="shed"))
    assert [line["met"] for line in judge(parse_objectives(objective), figures, None)] == [met]


def test_a_run_without_requests_meets_nothing() -> None:
    lines = judge(parse_objectives("failed<1,ttft_p95<9,tokens_per_second>0"), figures_of(), None)
    assert [line["met"] for line in lines] == [False] * 3


def test_acceptance_is_the_servers_own_where_it_was_asked() -> None:
    server = {"acceptance": {"rate": 0.5, "length": 2.5}}
    (line,) = judge(parse_objectives("acceptance_length>2"), figures_of(ended(0.0)), server)
    assert (line["value"], line["met"]) == (2.5, True)


@pytest.mark.parametrize(
    "text", ["ttft<1", "ttft_p95=1", "ttft_p95<", "ttft_p95<1,", "ttft_p95<1e999", "p95<1", "shed<a"]
)
def test_an_objective_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--slo: "):
        parse_objectives(text)


# the server's account


def metrics(drafts: int, ttft: tuple[float, int], *, engine: str = "0") -> str:
    labels = f'model_name="m",engine="{engine}"'
    return (
        "# HELP truedraft_spec_decode_num_drafts_total Drafts.\n"
        f"truedraft_spec_decode_num_drafts_total{{{labels}}} {drafts}.0\n"
        f"truedraft_spec_decode_num_draft_tokens_total{{{labels}}} {4 * drafts}.0\n"
        f"truedraft_spec_decode_num_accepted_tokens_total{{{labels}}} {2 * drafts}.0\n"
        f'truedraft_admission_rejections_total{{{labels},reason="queue_full"}} {drafts}.0\n'
        f'truedraft_admission_rejections_total{{{labels},reason="bodies"}} 0.0\n'
        f"truedraft_time_to_first_token_seconds_sum{{{labels}}} {ttft[0]}\n"
        f"truedraft_time_to_first_token_seconds_count{{{labels}}} {ttft[1]}.0\n"
        f"vllm:spec_decode_num_drafts_total{{{labels}}} 77\n"
    )


def window(before: list[str], after: list[str]) -> dict[str, Any]:
    return Window(Scrape(before, "truedraft_"), Scrape(after, "truedraft_")).figures()


def test_acceptance_and_means_are_those_of_the_time_between_two_scrapes() -> None:
    server = window([metrics(10, (1.0, 4))], [metrics(30, (4.0, 10))])
    assert server["acceptance"] == {"rate": 0.5, "length": 3.0}
    assert server["ttft"] == {"mean": 0.5, "count": 6}
    assert server["rejections"] == {"queue_full": 20}
    assert server["itl"] == {"mean": None, "count": 0}
    assert server["counts"]["preemptions"] is None


def test_several_replicas_are_summed() -> None:
    server = window([metrics(0, (0, 0)), metrics(5, (1, 1))], [metrics(1, (1, 1)), metrics(10, (2, 2))])
    assert server["counts"]["drafts"] == 6


@pytest.mark.parametrize("after", [metrics(3, (9.0, 9)), metrics(30, (4.0, 10), engine="1")])
def test_a_restart_in_between_makes_the_account_useless(after: str) -> None:
    server = window([metrics(10, (1.0, 4))], [after])
    assert server == {"restarted": True, "acceptance": {"rate": None, "length": None}}


# for people


def test_the_summary_shows_both_sides_and_every_objective() -> None:
    measurement = Measurement()
    measurement.next_step(2, 0.0, 0.0)
    for record in (ended(1.0), ended(1.0, kind="code"), ended(2.0, outcome="shed")):
        measurement.add(record)
    figures = measurement.figures()
    server = window([metrics(10, (1.0, 4))], [metrics(30, (4.0, 10))])
    slo = judge(parse_objectives("ttft_p95<0.5,failed<0.1"), figures["total"], server)
    lines = report_lines({"loop": "closed", **figures, "server": {**server, **LACKING}, "slo": slo})
    text = "\n".join(lines)
    assert "1 503 overloaded" in text.replace("shed: ", "")
    assert "acceptance length 3" in text
    assert "MISSED ttft_p95<0.5: 1" in text
    assert "met    failed<0.1: 0" in text
    (row,) = [line.split() for line in lines if line.split()[:1] == ["TTFT"]]
    assert row[1:3] == ["2", "1000.0"]
    assert row[-1] == "500.0"  # the server's


LACKING = {"queue": {"mean": None, "count": 0}}
