"""``run_suite`` on a tiny model: it passes where nothing is wrong, and names the place where something is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec.step
from bench.verify.cases import plan_case
from bench.verify.plain import PlainAnswers
from bench.verify.pool import SAMPLING, RequestPool
from bench.verify.progress import Silent
from bench.verify.report import write_report
from bench.verify.run import Options, Verification, run_suite
from kvcache.manager import KVCacheManager
from kvcache.table import BlockTable
from model.batch import PackedBatch
from model.loader import LoadedModel
from server.ending import Ended
from specdec.drafters.ngram import NgramDrafter
from tests.bench.verify_builders import accept_one_too_many, load_tiny, rows_at, with_fault

POSITION = 50  # where the planted faults are: behind the prompts of most requests, within most answers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("home"))


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(**changes: str) -> str:
    """The list of values of a case, as --case takes it."""
    chosen = {
        "batch": "4", "sampling": "greedy", "prompts": "random", "length": "64", "condition": "none", "cache": "cold",
        "drafter": "oracle", "k": "4", "block_size": "16", "chunk": "512", "threads": "1", "arrival": "together",
        "aborts": "no", **changes,
    }  # fmt: skip
    return ",".join(f"{name}={value}" for name, value in chosen.items())


def one_case(model: LoadedModel, case: str) -> dict[str, Any]:
    report = run_suite(model, Options(cases=(case,)))
    (found,) = report["cases"]
    assert report["passed"] is (found["status"] == "passed")
    assert isinstance(found, dict)
    return found


def test_a_sound_model_passes_and_the_report_counts_what_was_compared(model: LoadedModel) -> None:
    report = run_suite(model, Options(max_positions=1200))
    coverage = report["coverage"]
    assert report["passed"]
    assert not report["interrupted"]
    assert {case["status"] for case in report["cases"]} == {"passed"}
    assert coverage["cases_run"] == coverage["cases_planned"] == len(report["cases"])
    assert coverage["positions"] == coverage["positions_planned"] == sum(case["positions"] for case in report["cases"])
    assert 500 < coverage["positions"] <= 1200
    assert 0 < coverage["pairs_covered"] < coverage["pairs_total"]
    assert sum(coverage["factors"]["sampling"].values()) == coverage["cases_run"]
    assert sum(case["drafted"] for case in report["cases"]) > sum(case["accepted"] for case in report["cases"]) > 0
    assert sum(case["preemptions"] for case in report["cases"]) > 0
    assert report["model"]["exactness_level"] == "L0"
    json.dumps(report)


def test_a_pool_of_requests_tells_its_sampling_sets_apart(model: LoadedModel) -> None:
    """The comparison has teeth: the sampling sets give different answers, and stop tokens end some of them."""
    pool = RequestPool(model.info, model.tokenizer_or_none)
    plain = PlainAnswers(model, pool)
    cells = [cell for cell in pool.cells() if cell.prompts == "code"]
    plain.compute(dict.fromkeys(cells, 32))
    answers = {cell.sampling: plain.answer(cell, 32) for cell in cells}
    assert set(answers) == set(SAMPLING)
    assert len({answer.token_ids for answer in answers.values()}) == len(SAMPLING)


def test_a_fault_in_batches_is_found_where_it_is(model: LoadedModel) -> None:
    token = 7

    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if batch.num_sequences > 1:
            logits[rows_at(batch, POSITION), token] = 1e4

    found = one_case(with_fault(model, spoil), values(batch="4"))
    divergence = found["divergence"]
    assert found["status"] == "failed"
    assert divergence["kind"] == "token"
    at, start = divergence["output_index"], divergence["window_start"]
    verification = Verification(model, Options(), Silent())
    plan = plan_case(verification.suite.find(values()), verification.pool)
    # The row at POSITION decides the token after it.
    assert verification.pool.num_prompt(plan.runs[0][divergence["request"]].cell) + at - 1 == POSITION
    assert divergence["got"][at - start] == token != divergence["expected"][at - start]
    assert divergence["expected"][: at - start] == divergence["got"][: at - start]
    assert divergence["got_top"][0][:2] == [token, 1e4]
    assert divergence["expected_top"][0][0] == divergence["expected"][at - start]
    assert divergence["expected_top"][0][1] > divergence["expected_top"][1][1]
    assert len(divergence["step_batch"]) > 1
    assert divergence["request"] in [item["request"] for item in divergence["step_batch"]]
    assert all(len(divergence[side]) == len(divergence[f"{side}_tokens"]) for side in ("expected", "got"))


def test_a_verification_that_accepts_one_too_many_is_found(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.step, "verify", accept_one_too_many)
    found = one_case(model, values(drafter="random"))
    divergence = found["divergence"]
    assert found["status"] == "failed"
    (item,) = [each for each in divergence["step_batch"] if each["request"] == divergence["request"]]
    at = divergence["output_index"] - divergence["window_start"]
    assert divergence["got"][at] == item["drafts"][0]  # the draft that should have been rejected
    assert divergence["got"][at] != divergence["expected"][at]
    assert divergence["expected_top"] == divergence["got_top"]  # the logits were right


def test_the_replay_command_runs_the_same_case(model: LoadedModel) -> None:
    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if batch.num_sequences > 1:
            logits[rows_at(batch, POSITION), 7] = 1e4

    faulty = with_fault(model, spoil)
    found = one_case(faulty, values(arrival="staggered", aborts="yes", cache="warm"))
    case = found["replay"].split("--case ")[1]
    again = one_case(faulty, case)
    drop = ("seconds",)
    assert {k: v for k, v in again.items() if k not in drop} == {k: v for k, v in found.items() if k not in drop}
    assert one_case(model, case)["status"] == "passed"


def test_logprobs_alone_are_enough_to_fail(model: LoadedModel) -> None:
    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if batch.num_sequences > 1:
            rows = rows_at(batch, POSITION)
            logits[rows, logits[rows].argmin(dim=-1)] += 0.01  # no token changes, the normaliser does

    found = one_case(with_fault(model, spoil), values())
    divergence = found["divergence"]
    assert (found["status"], divergence["kind"]) == ("failed", "logprob")
    assert divergence["expected"] == divergence["got"]
    assert divergence["expected_logprob"] != divergence["got_logprob"]


def test_an_engine_that_raises_is_an_error_of_that_case_alone(model: LoadedModel) -> None:
    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if batch.num_sequences > 1:
            raise RuntimeError("planted")

    report = run_suite(with_fault(model, spoil), Options(cases=(values(), values(batch="1"))))
    assert [case["status"] for case in report["cases"]] == ["error", "passed"]
    assert "planted" in report["cases"][0]["reason"]
    assert not report["passed"]


def test_a_drafter_that_fails_does_not_pass_for_one_that_was_proved(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def propose(self: NgramDrafter, requests: object) -> list[list[int]]:
        raise RuntimeError("planted")

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    found = one_case(model, values(drafter="ngram"))
    assert found["status"] == "failed"
    assert "the drafter failed" in found["reason"]


def noise(size: float) -> Callable[[PackedBatch, Tensor], None]:
    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if batch.num_sequences > 1:
            logits += size * torch.sin(torch.arange(logits.numel())).reshape(logits.shape)

    return spoil


def test_below_l0_rounding_is_tolerated_and_counted_and_a_wrong_token_is_not(model: LoadedModel) -> None:
    below = replace(model, exactness=replace(model.exactness, level="L2"))
    assert one_case(with_fault(model, noise(1e-4)), values(sampling="temperature-1"))["status"] == "failed"
    rounding = one_case(with_fault(below, noise(1e-4)), values(sampling="temperature-1"))
    assert rounding["status"] == "passed", rounding

    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if batch.num_sequences > 1:
            logits[rows_at(batch, POSITION), 7] = 1e4

    assert one_case(with_fault(below, spoil), values())["status"] == "failed"


def test_blocks_filled_while_decoding_are_read_again_by_later_turns(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix cache that hands out the slot of the last token, whose KV nobody wrote, is found."""
    monkeypatch.setenv("TRUEDRAFT_LEDGER", "off")  # it would see it too
    commit = KVCacheManager.commit

    def too_far(self: KVCacheManager, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        commit(self, table, token_ids, min(len(token_ids), len(table.blocks) * self.block_size))

    for size in ("4", "16"):
        with monkeypatch.context() as patch:
            case = values(cache="follow-up", block_size=size, length="16")
            assert one_case(model, case)["status"] == "passed"
            patch.setattr(KVCacheManager, "commit", too_far)
            assert one_case(model, case)["status"] == "failed"


def test_a_request_under_another_salt_that_is_given_cached_blocks_is_found(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_table = KVCacheManager.new_table
    for batch in ("1", "4"):
        case = values(cache="follow-up", batch=batch, block_size="4")
        found = one_case(model, case)
        assert (found["status"], found["did_not_happen"]) == ("passed", {})
        with monkeypatch.context() as patch:
            patch.setattr(KVCacheManager, "new_table", lambda self, salt=b"": new_table(self))
            found = one_case(model, case)
        assert found["status"] == "failed"
        assert "another cache salt" in found["reason"]


def test_a_case_does_the_same_steps_alone_as_in_a_suite(model: LoadedModel) -> None:
    """Which plain answers other cases needed changes nothing, though aborted requests are drafted for too."""
    cases = [
        values(drafter=name, aborts="yes", cache=cache, length="16")
        for name, cache in (("perfect", "cold"), ("oracle", "follow-up"), ("random", "warm"))
    ]
    company = [values(sampling=name, length="64", prompts="code", batch="16") for name in ("hot", "greedy")]
    together = run_suite(model, Options(cases=(*company, *cases)))["cases"][2:]
    assert len({found["steps_digest"] for found in together}) == len(cases)
    for case, found in zip(cases, together, strict=True):
        alone = one_case(model, case)
        assert alone["aborted"] > 0
        assert alone["steps_digest"] == found["steps_digest"]


def test_what_a_case_names_counts_as_covered_only_if_it_came_about(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = values(drafter="ngram", prompts="repeated")
    monkeypatch.setattr(NgramDrafter, "propose", lambda self, requests: [[] for _ in requests])
    coverage = run_suite(model, Options(cases=(case,)))["coverage"]
    assert (
        coverage["happened"]["drafter ngram"] | {"cases": 1, "came_about": 0} == coverage["happened"]["drafter ngram"]
    )
    assert coverage["pairs_happened"]["batch 4, block_size 16"]["came_about"] == 1
    assert coverage["pairs_happened"]["batch 4, drafter ngram"]["came_about"] == 0
    # Of 13 factors, drafter and k did not come about.
    assert coverage["pairs_covered"] == 11 * 10 // 2
    reasons = {item["pair"]: item["reason"] for item in coverage["pairs_missing"]}
    assert reasons["drafter ngram, k 4"] == "in 1 cases: nothing was drafted"


def test_pressure_presses_and_batches_run_together(model: LoadedModel) -> None:
    tight = values(condition="tight", batch="8", block_size="4", drafter="random", k="2")
    preempt = values(condition="preempt", batch="4", length="7", drafter="random", k="2")
    report = run_suite(model, Options(cases=(tight, preempt, values(batch="16", length="1", drafter="random"))))
    assert report["passed"]
    assert [case["did_not_happen"] for case in report["cases"]] == [{}, {}, {}]
    assert report["coverage"]["happened"]["condition tight"]["preemptions"] > 0


def test_plain_decoding_that_fails_is_an_error_of_the_cases_that_need_it(model: LoadedModel) -> None:
    def spoil(batch: PackedBatch, logits: Tensor) -> None:
        if int(batch.positions.max()) == POSITION:
            raise ValueError("planted in plain decoding")

    report = run_suite(with_fault(model, spoil), Options(cases=(values(), values(batch="1", length="2"))))
    assert [case["status"] for case in report["cases"]] == ["error", "passed"]
    assert "plain decoding of random, greedy failed: ValueError: planted" in report["cases"][0]["reason"]
    assert not report["passed"]


def test_a_bound_on_positions_spreads_over_the_factors(model: LoadedModel) -> None:
    verification = Verification(model, Options(max_positions=3000), Silent())
    chosen = [case.values for case in verification.cases]
    for name in ("batch", "sampling", "prompts", "condition", "cache", "drafter", "k", "block_size", "chunk"):
        (factor,) = [factor for factor in verification.suite.design.factors if factor.name == name]
        assert {row[name] for row in chosen} == set(factor.values), name


class Interrupts(Silent):
    """Ctrl-C while the third case is reported."""

    def advance(self, units: float, text: str) -> None:
        if text.startswith("case 3"):
            raise Ended(2)


def test_an_interrupted_run_reports_what_it_did_and_did_not(model: LoadedModel, tmp_path: Path) -> None:
    verification = Verification(model, Options(max_positions=300), Interrupts())
    report = verification.run()
    assert isinstance(verification.ended, Ended)
    assert (report["interrupted"], report["passed"]) == (True, False)
    states = [case["status"] for case in report["cases"]]
    assert states[:3] == ["passed"] * 3
    assert set(states[3:]) == {"not run"}
    assert report["coverage"]["cases_run"] == 3
    write_report(tmp_path, report)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert "<html" in (tmp_path / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_the_reference_is_transformers_own_generate(model: LoadedModel, tmp_path: Path) -> None:
    fresh = load_tiny(tmp_path / "model", tmp_path / "home")
    report = run_suite(fresh, Options(max_positions=60, reference=tmp_path / "model"))
    reference = report["reference"]
    assert reference["status"] == "passed", reference
    assert reference["positions"] > 100
    assert reference["mismatches"] == []
    assert report["passed"]
