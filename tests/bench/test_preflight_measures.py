"""What preflight computes: acceptance of known outputs, step cost, load, expected gain, the checklist's answers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from bench.offline import Completion, OfflineConfig, OfflineEngine, blocks_for
from bench.preflight.acceptance import Replay, replay
from bench.preflight.checklist import (
    alerts_line,
    audit_line,
    exactness_line,
    fragmentation_line,
    memory_bound_line,
    rollback_line,
    slower_line,
)
from bench.preflight.controlled import replay_controlled
from bench.preflight.cost import Range, StepCost, Timing, measure_cost
from bench.preflight.equivalence import verify_line
from bench.preflight.gain import best_replay, expected_gain, gains
from bench.preflight.load import find_load, requests_per_second
from bench.preflight.recorded import judge, replay_configured, replay_drafters
from bench.preflight.traffic import RecordedRequest
from model.loader import LoadedModel
from specdec.drafters.registry import make_drafter
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter
from specdec.params import SamplingParams
from specdec.plan import StepStats
from tests.bench.report_builders import build_report, failed_report, interrupted_report
from tests.exactness.tiny import TINY_MODELS, load_tiny
from tests.server.builders import build_settings

OUTPUTS = [([1, 2, 3], list(range(10, 31))), ([4], [7] * 9), ([5], [6])]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(TINY_MODELS["qwen3 fp32"], tmp_path_factory.mktemp("tiny"))


def oracle() -> OracleDrafter:
    return OracleDrafter({seq_id: output for seq_id, (_, output) in enumerate(OUTPUTS)})


def request(line: int, *, prompt: int = 8, output: int = 11, **changes: float | None) -> RecordedRequest:
    return RecordedRequest(
        line, (1,) * prompt, (2,) * output, output, changes.get("arrival"), changes.get("latency"), {"seed": line}
    )


def flat_cost(*, row_seconds: float = 0.0, batches: tuple[int, ...] = (1, 2, 4)) -> StepCost:
    """t = 10 ms + ``row_seconds`` for each row beyond the first; a prefill takes 20 ms."""
    ks = (0, 1, 2, 4)
    seconds = {(b, k): 0.01 + row_seconds * (b * (k + 1) - 1) for b in batches for k in ks}
    timings = {kind: Timing(value, value, value, 3) for kind, value in seconds.items()}
    return StepCost(100, batches, ks, timings, prefill_seconds=0.02)


def test_an_oracle_is_accepted_everywhere_and_the_counts_add_up() -> None:
    found = replay(oracle(), OUTPUTS, 3)
    # 21 tokens: 1 from the prefill, then 5 steps of 4. 9 tokens: 1, then 2 steps of 4. 1 token: no step.
    assert (found.steps, found.emitted, found.drafts) == (7, 28, 7)
    assert found.drafted == found.accepted == 21
    assert found.offered_at == found.accepted_at == (7, 7, 7)
    assert (found.acceptance_rate, found.acceptance_length, found.tokens_per_step) == (1.0, 4.0, 4.0)


def test_wrong_drafts_are_rejected_and_a_step_still_emits_one_token() -> None:
    found = replay(WrongDrafter(oracle(), 3, 1000), OUTPUTS, 3)
    assert (found.accepted, found.tokens_per_step, found.acceptance_length) == (0, 1.0, 1.0)
    assert found.emitted == found.steps == 28
    assert set(found.accepted_at) == {0}


def test_a_draft_never_reaches_beyond_the_output() -> None:
    found = replay(oracle(), [([1], [10, 11, 12])], 8)
    assert found.drafted == 1
    assert found.emitted == 2


def test_the_replay_of_an_output_counts_what_the_engine_counts(tiny: LoadedModel) -> None:
    """The claim behind the whole table: acceptance read off an output is the acceptance of the run that made it."""
    stops: frozenset[int] = frozenset()
    prompts = [[(7 * i + j % 5) % 200 for j in range(30)] for i in range(4)]
    requests = [
        (prompt, SamplingParams(seed=i, max_tokens=30, stop_token_ids=stops)) for i, prompt in enumerate(prompts)
    ]

    def run(k: int) -> tuple[list[Completion], list[StepStats]]:
        config = OfflineConfig(num_speculative_tokens=k, prefix_cache=False)
        engine = OfflineEngine(tiny.executor, config, num_blocks=blocks_for(requests, 16, 16))
        return [engine.generate([one])[0] for one in requests], engine.steps

    plain, _ = run(0)
    speculative, steps = run(3)
    assert [answer.token_ids for answer in plain] == [answer.token_ids for answer in speculative]
    outputs = [(prompt, answer.token_ids) for prompt, answer in zip(prompts, plain, strict=True)]
    found = replay(make_drafter("ngram", tiny.info.vocab_size), outputs, 3)
    # The engine may draft in the step that ends the prefill; the replay counts decode steps only.
    first = sum(step.num_drafted for step in steps if step.num_rows > 4)
    assert first == 0
    assert found.accepted == sum(step.num_accepted for step in steps)
    assert found.drafted == sum(step.num_drafted for step in steps)
    assert found.accepted > 0


LOOPS = [([1, 2, 3, 4], [5, 6, 7, 8] * 12) for _ in range(6)]


def test_with_the_controller_all_that_is_proposed_is_counted_where_it_decides_nothing() -> None:
    """``adaptive`` False, one sequence at a time: what the drafter's own replay counts."""
    cost = flat_cost(row_seconds=0.01)
    found = replay_controlled("suffix", LOOPS, 4, batch=1, cost=cost, vocab_size=100, adaptive=False)
    assert found == dataclasses.replace(replay(make_drafter("suffix", 100), LOOPS, 4), batch=1)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_controller_drafts_where_rows_are_cheap_and_not_where_they_cost_what_they_bring(batch: int) -> None:
    def run(row_seconds: float) -> Replay:
        cost = flat_cost(row_seconds=row_seconds)
        return replay_controlled("auto", LOOPS, 4, batch=batch, cost=cost, vocab_size=100)

    cheap, dear = run(0.0), run(0.02)
    assert cheap.num_requests == dear.num_requests == len(LOOPS)
    assert cheap.emitted == dear.emitted == sum(len(output) - 1 for _, output in LOOPS)
    assert cheap.tokens_per_step > 2.5
    assert dear.drafted < 0.05 * dear.steps
    assert (cheap.drafter, cheap.batch) == ("auto", batch)
    (gain,) = gains([cheap], flat_cost())
    assert gain.controlled
    assert gain.expected > 2.5


def test_the_controller_is_led_along_empty_and_short_outputs_too() -> None:
    found = replay_controlled(
        "auto", [([1], []), ([1], [2]), ([1], [2, 3])], 4, batch=2, cost=flat_cost(), vocab_size=9
    )
    assert (found.num_requests, found.steps, found.emitted, found.drafted) == (3, 1, 1, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "as configured (auto, k = 4) "),
        ({"drafter": "suffix"}, "as configured (suffix, k = 4) "),
        ({"drafter": "suffix", "draft_length": "fixed"}, "as configured (suffix, k = 4) 100%"),
        ({"drafter": "exit"}, "drafter exit, k = 4 was not replayed"),
        ({"draft_model": "some/model"}, "(auto, k = 4, without its draft model) "),
    ],
)
def test_what_is_configured_is_judged_and_the_default_is(changes: dict[str, Any], told: str) -> None:
    settings = build_settings(num_speculative_tokens=4, **changes)
    cost, load = flat_cost(), find_load([request(0)], flat_cost())
    own = replay_configured(settings, LOOPS, cost, load, 100)
    replays = [*replay_drafters(LOOPS, [4], 100), *([own] if own is not None else [])]
    _, acceptance = judge(replays, cost, load, settings)
    assert told in acceptance.reason
    assert acceptance.answer == ("unknown" if changes.get("drafter") == "exit" else "yes")


def test_step_times_are_measured_for_every_batch_and_draft_length(tiny: LoadedModel) -> None:
    seen: list[str] = []
    cost = measure_cost(tiny.executor, batches=(1, 3), ks=(2,), context=40, rounds=2, progress=seen.append)
    assert set(cost.timings) == {(b, k) for b in (1, 3) for k in (0, 2)}
    assert all(0 < t.low <= t.median <= t.high for t in cost.timings.values())
    assert cost.prefill_seconds > 0
    assert cost.context == 40
    assert len(seen) == 3


def test_the_context_is_cut_to_what_the_model_has_room_for(tiny: LoadedModel) -> None:
    cost = measure_cost(tiny.executor, batches=(1,), ks=(2,), context=10**6, rounds=1)
    assert cost.context == tiny.info.max_model_len - 4


def test_a_row_costs_nothing_where_memory_is_the_bound_and_one_where_it_is_not() -> None:
    assert flat_cost().row_cost(2, 4).median == 0.0
    assert flat_cost().bound(1, 4) == 5.0
    compute = flat_cost(row_seconds=0.01)  # t = 10 ms x rows
    assert compute.row_cost(1, 4).median == pytest.approx(1.0)
    assert compute.bound(2, 4) == pytest.approx(1.0)


def test_times_between_the_measured_ones_are_linear_and_constant_beyond() -> None:
    cost = flat_cost(row_seconds=0.001)
    assert cost.seconds(1, 3) == pytest.approx((cost.at(1, 2) + cost.at(1, 4)) / 2)
    assert cost.seconds(3, 0) == pytest.approx((cost.at(2, 0) + cost.at(4, 0)) / 2)
    assert cost.seconds(99, 9) == cost.at(4, 4)
    assert cost.seconds(0.2, 0) == cost.at(1, 0)


def test_the_expected_gain_is_tokens_a_step_against_what_the_step_costs() -> None:
    found = replay(oracle(), OUTPUTS, 4)
    cost = flat_cost(row_seconds=0.001)
    expected = found.tokens_per_step * cost.at(1, 0) / cost.seconds(1, found.drafted_per_step)
    assert expected_gain(found, cost, 1).median == pytest.approx(expected)
    # No gain can be above the bound of its k when every step drafts k.
    full = replay(OracleDrafter({0: list(range(10, 31))}), OUTPUTS[:1], 4)
    assert expected_gain(full, cost, 2).median == pytest.approx(cost.bound(2, 4))


def test_without_drafts_nothing_is_gained_or_lost() -> None:
    assert expected_gain(replay(make_drafter("none", 100), OUTPUTS, 4), flat_cost(row_seconds=0.01), 1).median == 1.0


def test_every_drafter_has_a_gain_at_every_batch_and_the_best_is_the_one_that_gains_most() -> None:
    good, bad = replay(oracle(), OUTPUTS, 2), replay(WrongDrafter(oracle(), 1, 1000), OUTPUTS, 2)
    cost = flat_cost(row_seconds=0.002)
    assert {(gain.drafter, gain.batch) for gain in gains([good, bad], cost)} == {
        (name, batch) for name in ("oracle", "wrong-oracle") for batch in cost.batches
    }
    assert best_replay([bad, good], cost, 1) is good
    assert best_replay([], cost, 1) is None


def test_concurrency_is_arrival_rate_times_recorded_latency() -> None:
    requests = [request(i, arrival=100 + i / 4, latency=2.0) for i in range(9)]
    load = find_load(requests, flat_cost())
    assert load.requests_per_second == 4.0
    assert load.concurrency == 8.0


def test_without_latencies_concurrency_is_what_the_measured_steps_make_of_the_arrivals() -> None:
    cost = flat_cost()  # alone a request of 11 tokens takes 20 + 10 x 10 = 120 ms
    assert requests_per_second(1, 11, cost) == pytest.approx(1 / 0.12)
    idle = find_load([request(i, arrival=i * 0.24) for i in range(5)], cost)
    assert idle.concurrency == pytest.approx(0.5)
    busy = find_load([request(i, arrival=i / requests_per_second(2, 11, cost)) for i in range(50)], cost)
    assert busy.concurrency == pytest.approx(2.0, abs=0.1)
    assert not busy.saturated


def test_more_than_can_be_served_is_said() -> None:
    load = find_load([request(i, arrival=i * 0.001) for i in range(50)], flat_cost())
    assert load.saturated
    assert load.concurrency == 4.0
    assert "arrive; plain decoding here serves" in load.how


@pytest.mark.parametrize("arrivals", [[None, None, None], [None, 3.0, None], [5.0, 5.0, 5.0]])
def test_without_arrivals_the_concurrency_is_unknown(arrivals: list[float | None]) -> None:
    load = find_load([request(i, arrival=arrival) for i, arrival in enumerate(arrivals)], flat_cost())
    assert load.concurrency is None
    assert "at least 2 are needed" in load.how


def test_slower_needs_every_round_to_agree() -> None:
    def answer(*ratios: float) -> str:
        return slower_line("x", [(ratio, 1.0) for ratio in ratios], "a token takes").answer

    assert [answer(1.2, 1.3, 0.9), answer(0.98, 0.99, 0.97), answer(0.9, 0.8, 0.95), answer(0.9, 0.8, 1.1)] == [
        "yes",
        "yes",
        "no",
        "unknown",
    ]
    assert slower_line("x", [], "").answer == "unknown"


def test_memory_bound_is_unknown_where_the_spread_allows_both() -> None:
    def answer(low: float, high: float) -> str:
        return memory_bound_line(Range((low + high) / 2, low, high), 2, 4, 3.0).answer

    assert [answer(0.1, 0.2), answer(0.7, 0.9), answer(0.2, 0.8)] == ["yes", "no", "unknown"]


@pytest.mark.parametrize(
    ("rate", "counts", "answer", "reason"),
    [
        (None, None, "no", "no audits"),
        (0.01, None, "no", "no audits"),
        (0.0, {"match": 0.0}, "no", "audit_rate is 0"),
        (0.01, {"match": 0.0, "mismatch": 0.0, "dropped": 3.0}, "unknown", "no audit has ended"),
        (0.01, {"match": 5.0, "mismatch": 0.0}, "yes", "5 match"),
        (0.01, {"match": 5.0, "mismatch": 1.0}, "no", "1 audits found another output"),
        (0.0, {"match": 5.0, "mismatch": 1.0}, "no", "found another output"),
    ],
)
def test_the_audit_line(rate: float | None, counts: dict[str, float] | None, answer: str, reason: str) -> None:
    line = audit_line(rate, counts)
    assert line.answer == answer
    assert reason in line.reason


def test_audits_that_were_switched_off_are_a_no() -> None:
    counts = {"match": 5.0, "mismatch": 0.0}
    assert [audit_line(0.01, counts, enabled).answer for enabled in (1, 0)] == ["yes", "no"]


def test_fragmentation_rollback_and_level() -> None:
    assert [fragmentation_line(ratios).answer for ratios in ([], [0.1, 0.2], [0.3, 0.4])] == ["unknown", "yes", "no"]
    assert rollback_line(None, 5, 0).answer == "unknown"
    assert rollback_line(0, 0, 0).answer == "unknown"
    assert rollback_line(3, 5, 0).answer == "yes"
    assert rollback_line(3, 5, 64).answer == "no"
    assert [exactness_line(level, "why").answer for level in ("L0", "L2")] == ["yes", "no"]


def test_alerts_are_there_only_if_one_watches_for_mismatches(tmp_path: Path) -> None:
    assert alerts_line(None).answer == "unknown"
    assert alerts_line(tmp_path).answer == "no"
    (tmp_path / "prometheus.yml").write_text("scrape_configs: []\n")
    (tmp_path / "broken.yml").write_text("a: [\n")
    assert alerts_line(tmp_path).answer == "no"
    rules = tmp_path / "rules.yml"
    rules.write_text("groups: [{name: g, rules: [{alert: Slow, expr: up == 0}]}]\n")
    assert "none of the 1 alerts" in alerts_line(tmp_path).reason
    rule = 'increase(truedraft_equivalence_audits_total{result=\\"mismatch\\"}[5m]) > 0'
    rules.write_text(f'groups: [{{name: g, rules: [{{alert: Mismatch, expr: "{rule}"}}]}}]\n')
    assert (alerts_line(tmp_path).answer, alerts_line(rules).answer) == ("yes", "yes")


def test_equivalence_is_what_verify_found() -> None:
    empty = {**build_report(), "coverage": {"positions": 0}}
    unpassed = {**build_report(), "passed": False}
    answers = [verify_line(r).answer for r in (build_report(), failed_report(), interrupted_report(), empty, unpassed)]
    assert answers == ["yes", "no", "unknown", "unknown", "no"]
    assert "0 differences" in verify_line(build_report()).reason


def test_a_random_replay_adds_up() -> None:
    rng = random.Random(5)
    outputs = [([1], [rng.randrange(3) for _ in range(rng.randrange(1, 40))]) for _ in range(20)]
    found: Replay = replay(make_drafter("ngram", 3), outputs, 4)
    assert found.emitted == sum(len(output) - 1 for _, output in outputs) == found.steps + found.accepted
    assert sum(found.offered_at) == found.drafted
    assert sum(found.accepted_at) == found.accepted
    assert list(found.accepted_at) == sorted(found.accepted_at, reverse=True)
