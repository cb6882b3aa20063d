"""Drafters with forwards of their own in ``truedraft verify``: they pass, and what is wrong with them is found."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bench.verify.cases import Case, plan_case
from bench.verify.costs import InventedCosts
from bench.verify.draft_model import DraftModel, target_as_draft
from bench.verify.drafters import find_drafters
from bench.verify.html import render
from bench.verify.pool import RequestPool
from bench.verify.progress import Silent
from bench.verify.run import Options, Verification, run_suite
from kvcache.storage import KVStorage
from model.batch import PackedBatch
from model.exits import FirstLayers
from model.interface import Executor, ExitExecutor, ForwardOutput
from model.loader import LoadedModel
from model.wrapped import WrappedExecutor
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.lengths import Choice
from specdec.drafters.draft import Draft
from tests.bench.verify_builders import load_tiny

CASE = {
    "batch": "4", "sampling": "top-p", "prompts": "random", "length": "16", "condition": "none", "cache": "cold",
    "drafter": "model", "k": "4", "block_size": "4", "chunk": "128", "threads": "1", "arrival": "staggered",
    "aborts": "yes",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def model(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(folder, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def draft(model: LoadedModel, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> DraftModel:
    found = target_as_draft(model, folder, lambda line: None, home=tmp_path_factory.mktemp("home"))
    assert isinstance(found, DraftModel)
    return found


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def spec(**changes: str) -> str:
    return ",".join(f"{name}={value}" for name, value in {**CASE, **changes}.items())


def run(model: LoadedModel, draft: DraftModel | None, *cases: str, seed: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run_suite(model, Options(cases=cases, seed=seed), draft=draft)["cases"]
    return found


PRESSED = (
    {"condition": "preempt", "batch": "2", "cache": "warm", "block_size": "1", "k": "2", "aborts": "no"},
    {
        "condition": "tight", "batch": "8", "length": "64", "prompts": "mixed", "sampling": "hot", "cache": "off",
        "block_size": "16", "chunk": "512", "arrival": "shuffled",
    },
    {"cache": "follow-up"},
    {"cache": "warm", "sampling": "everything", "k": "8"},
)  # fmt: skip


@pytest.mark.case("V 8783")
@pytest.mark.case("V 28558")
def test_under_pressure_on_its_planes_a_drafter_with_forwards_passes(model: LoadedModel, draft: DraftModel) -> None:
    cases = [spec(drafter=drafter, **pressed) for drafter in ("model", "exit", "auto") for pressed in PRESSED]
    report = run_suite(model, Options(cases=tuple(cases)), draft=draft)
    assert report["draft"] == "tiny, the target itself"
    assert "tiny, the target itself" in render(report)
    for found in report["cases"]:
        assert found["status"] == "passed", found
        assert found["did_not_happen"] == {}
        assert found["positions"] > 20
        if found["factors"]["drafter"] == "model":
            assert found["accepted"] == found["drafted"] > 0  # it is the target
            assert found["drafted_by"] == {"model": found["drafted"]}


class SpoilsItsPlanes(WrappedExecutor):
    """Writes noise over the KV of some rows after it has read them: their slots' tags go on saying that all is well."""

    storage: KVStorage | None = None

    def bind(self, storage: KVStorage) -> None:
        self.storage = storage
        super().bind(storage)

    def forward(self, batch: PackedBatch, **options: Any) -> ForwardOutput:
        output = super().forward(batch, **options)
        assert self.storage is not None
        slots = batch.slot_mapping[batch.positions % 3 == 0]
        for plane in self.planes:
            held = self.storage.plane(plane.name)
            held[slots] = -2.0 * held[slots] + 1.0
        return output


def test_a_draft_model_with_wrong_kv_costs_acceptance_and_no_output(model: LoadedModel, draft: DraftModel) -> None:
    """And if it is the target itself, the fault is found by that."""
    cases = [spec(sampling=name) for name in ("greedy", "hot")]
    spoiled = replace(draft, executor=SpoilsItsPlanes(draft.executor), is_target=False)
    for found in run(model, spoiled, *cases):
        assert found["status"] == "passed"
        assert found["accepted"] < 0.9 * found["drafted"]
    for found in run(model, replace(spoiled, is_target=True), *cases):
        assert (found["status"], found["divergence"]) == ("failed", None)
        assert "drafts of the target itself only" in found["reason"]


def test_a_controller_that_picks_nonsense_changes_no_output(
    model: LoadedModel, draft: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    asked: list[int] = []
    sound = DraftLengthController.settle

    def settle(self: DraftLengthController, drafts: Sequence[Draft | None], *, rows: int, tokens: int) -> Choice:
        choice = sound(self, drafts, rows=rows, tokens=tokens)
        lengths = tuple(rng.choice((0, 1, 2, 5, 100)) for _ in choice.lengths)
        asked.extend(lengths)
        return replace(choice, lengths=lengths)

    monkeypatch.setattr(DraftLengthController, "settle", settle)
    cases = [spec(drafter="auto", **pressed) for pressed in PRESSED]
    for found in run(model, draft, *cases):
        assert found["status"] == "passed", found
    assert len(set(asked)) == 5


def test_auto_decides_alike_in_every_run_and_otherwise_in_another_case_or_seed(
    model: LoadedModel, draft: DraftModel
) -> None:
    case = spec(drafter="auto", length="64", batch="8", sampling="greedy", aborts="no")
    (first,), (again,) = run(model, draft, case), run(model, draft, case)
    assert first["steps_digest"] == again["steps_digest"]
    assert first["drafted_by"] == again["drafted_by"]
    assert len(first["drafted_by"]) >= 2, first["drafted_by"]
    executor = model.executor
    assert isinstance(executor, ExitExecutor)
    layers, storage = FirstLayers(executor, 1), KVStorage(executor.planes, num_blocks=1, block_size=4)
    curves = {
        (costs(executor, storage, 64).points, costs(layers, storage, 64).points)
        for costs in (InventedCosts(f"{seed}/{name}", executor) for seed in range(6) for name in ("a", "b"))
    }
    assert len(curves) >= 6


def test_beside_auto_some_requests_name_a_drafter_or_a_length_of_their_own(model: LoadedModel) -> None:
    values = {**CASE, "drafter": "auto", "batch": "16", "length": "64"}
    plan = plan_case(Case("c", values), RequestPool(model.info, model.tokenizer_or_none))
    named = [(ask.drafter, ask.num_drafts) for ask in plan.asks if ask.drafter is not None]
    assert {drafter for drafter, _ in named} == {"model", "exit", "suffix", "ngram"}
    assert {count for _, count in named} == {None, 4}
    assert any(ask.drafter is None and ask.num_drafts is None for ask in plan.asks)


class NoExit:
    """An executor that can only run as a whole."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.info, self.kind, self.planes, self.bind = inner.info, "stiff", inner.planes, inner.bind

    def forward(self, batch: PackedBatch, *, capture_layers: bool = False) -> ForwardOutput:
        output: ForwardOutput = self.inner.forward(batch, capture_layers=capture_layers)
        return output


def test_what_cannot_be_had_is_left_out_with_the_reason(model: LoadedModel, draft: DraftModel, folder: Path) -> None:
    stiff = replace(model, executor=cast(Executor, NoExit(model.executor)))
    why = target_as_draft(model, folder, lambda line: None, free=1000)
    assert isinstance(why, str)
    assert "--draft-model" in why
    report = run_suite(stiff, Options(cases=(spec(drafter="auto", prompts="repeated"),), no_draft=why))
    assert report["passed"], report["cases"]
    assert report["drafters_left_out"] == {"model": why, "exit": "stiff cannot stop after its first layers"}
    assert set(report["cases"][0]["drafted_by"]) <= {"ngram", "suffix"}
    assert report["draft"] is None
    assert why in render(report)
    for name in ("model", "exit"):
        with pytest.raises(ValueError, match=f"the drafter {name} cannot be had: "):
            find_drafters(stiff.executor, None, only=name, seed=0)
    with pytest.raises(ValueError, match=r"drafter = 'model': must be one of"):
        Verification(stiff, Options(cases=(spec(),)), Silent())
