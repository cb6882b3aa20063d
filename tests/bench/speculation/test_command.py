"""The whole benchmark on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.speculation import command
from bench.speculation.load_step import LoadStep
from bench.tiny_models import save_tiny_model
from model.batch import PackedBatch
from model.loader import LoadedModel
from tests.bench.verify_builders import with_fault

PART = ["--workload", "chat", "--temperature", "0", "--pairs", "2", "--tokens", "8", "--minutes", "5"]


@pytest.fixture
def opened(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    """What the command opens; a test may put another model there."""
    models = [tiny]
    monkeypatch.setattr(command, "open_model", lambda *args, **options: (models[0], Path()))
    return models


def test_it_measures_every_mode_that_can_be_built_and_finds_their_outputs_equal(
    opened: list[LoadedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "cells.json"
    assert command.main([*PART, "--concurrency", "3", "--json", str(found)]) == 0
    cells = json.loads(found.read_text())
    text = capsys.readouterr().out
    modes = {"off", "ngram", "suffix", "exit", "auto"}
    places = [(cell["concurrency"], cell["mode"]) for cell in cells]
    assert len(places) == len(set(places))
    assert set(places) >= {(3, mode) for mode in modes}
    for cell in cells:
        assert cell["tokens_per_s"] > 0
        assert cell["tpot_ms"] > 0
        assert cell["acceptance_length"] >= 1
        assert sum(cell["shares"].values()) == pytest.approx(1.0, abs=1e-3)
        assert cell["exactness"] == "L0"
        if cell["mode"] != "off":
            # A cell that missed the bar was run again with twice the pairs.
            assert cell["pairs"] == (4 if cell["first_attempt"] else 2)
            assert cell["different_outputs"] == 0
            assert cell["bound"] > 0
    assert {mode for _, mode in places} == modes
    assert "mode model left out: the drafter model needs a draft model" in text
    compared = next(line for line in text.splitlines() if line.startswith("outputs equal"))
    equal, total = (int(word) for word in compared.split(": ")[1].split(" of "))
    assert equal == total > 0


def test_an_output_that_depends_on_speculation_is_a_failure(
    opened: list[LoadedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(batch: PackedBatch, logits: torch.Tensor) -> None:
        if batch.num_rows == 4:  # only a verification of three drafts has so many
            logits[0, 7] = 1e4

    opened[0] = with_fault(opened[0], spoil)
    assert command.main([*PART, "--concurrency", "1", "--mode", "ngram", "suffix", "--k", "3"]) == 1
    text = capsys.readouterr().out
    assert "DIFFERENT: chat, concurrency 1, greedy" in text


def test_the_target_as_its_own_draft_model_is_always_accepted(
    opened: list[LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path / "home"))
    draft = save_tiny_model("llama", tmp_path / "draft")
    found = tmp_path / "cells.json"
    flags = ["--tokens", "9", "--k", "3", "--concurrency", "2", "--mode", "model", "--draft-model", str(draft)]
    assert command.main([*PART, *flags, "--json", str(found)]) == 0
    off, model = json.loads(found.read_text())
    assert (off["mode"], model["mode"]) == ("off", "model")
    assert model["acceptance_by_position"] == [1.0, 1.0, 1.0]
    assert model["acceptance_length"] > 3.0  # a draft is shorter while a prompt waits for a seat
    assert model["shares"]["draft"] > 0.1


def test_ctrl_c_leaves_a_report_of_what_there_is(
    opened: list[LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench.speculation import cells

    runs = 0
    real = cells.closed_loops

    def interrupted(*args, **options):  # type: ignore[no-untyped-def]
        nonlocal runs
        runs += 1
        if runs == 2:  # the second pair
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(cells, "closed_loops", interrupted)
    found = tmp_path / "cells.json"
    assert command.main([*PART, "--concurrency", "1", "--mode", "ngram", "--json", str(found)]) == 130
    assert [(cell["mode"], cell.get("pairs", cell.get("runs"))) for cell in json.loads(found.read_text())] == [
        ("off", 1),
        ("ngram", 1),
    ]
    assert "interrupted after 1 of 2 pairs" in capsys.readouterr().out


def test_the_load_step_shows_the_drafts_of_every_step_and_keeps_the_outputs(
    opened: list[LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = LoadStep(seats=4, alone=2, tokens=8)
    monkeypatch.setattr(command, "LoadStep", lambda: load)
    found = tmp_path / "steps.json"
    assert command.main(["--load-step", "--workload", "chat", "--json", str(found)]) == 0
    steps = json.loads(found.read_text())
    assert [step["step"] for step in steps] == list(range(len(steps)))
    assert max(step["decoding"] for step in steps) == 4
    assert all(len(step["drafts"]) == step["decoding"] for step in steps)
    assert steps[-1]["decoding"] == 1
    text = capsys.readouterr().out
    assert "one again" in text
    assert "outputs equal to those without speculation: 8 of 8" in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--minutes", "0"], "--minutes"),
        (["--pairs", "0"], "--pairs"),
        (["--tokens", "1"], "--tokens"),
        (["--temperature", "3"], "--temperature"),
        (["--concurrency", "0"], "--concurrency"),
        (["--mode", "magic"], "--mode"),
        (["--json", "/no/such/folder/x.json"], "--json"),
    ],
)
def test_a_bad_option_is_refused_by_name(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(flags)
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_outputs_that_do_not_fit_into_the_context_are_refused(
    opened: list[LoadedModel], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--workload", "chat", "--tokens", "5000"]) == 1
    assert "--tokens 5000" in capsys.readouterr().err
