"""The measurement of what observing costs: what it runs, what it compares, and when it objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.observing import BLOCK, Cell, Stepper, Timed, main, measure, render_seconds, report
from server.service import Service
from tests.server.builders import build_service, save_tiny_model
from tests.server.test_metrics import samples


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return build_service(save_tiny_model(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("home"))


def test_only_observed_steps_reach_the_metrics(service: Service) -> None:
    stepper = Stepper(service, 2)
    steps = 0
    for number in range(12):
        stepper.step(observed=number % 3 == 0)
        steps += number % 3 == 0
    stepper.close()
    found = samples(service.metrics.render().decode())
    assert found["iteration_tokens_total_count", frozenset()] == steps


def test_blocks_are_compared_only_where_no_prompt_was_computed(service: Service) -> None:
    cell = measure(service, 3, 8)
    assert 0 < len(cell.ratios) < 8  # the first has prompts
    assert len(cell.observed) == BLOCK * len(cell.ratios)
    assert all(one.step > 0 and one.observing > 0 for one in cell.observed)
    assert 0 < cell.share < 1
    assert render_seconds(service, 2) > 0


def cell(observing: float, ratios: list[float]) -> Cell:
    return Cell(8, [Timed(1.0 - observing, observing)] * 4, ratios)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (cell(0.01, [1.0, 1.01, 1.02]), None),
        (cell(0.01, [0.9, 1.1, 1.3]), None),  # noise contradicts nothing
        (cell(0.03, [1.0]), "8 sequences: observing took 3.00% of a step; 2.00% are allowed"),
        (
            cell(0.01, [1.05, 1.05, 1.05]),
            "8 sequences: observed steps were at least 5.00% longer than others; 2.00% are allowed",
        ),
        (Cell(8), "8 sequences: nothing was measured"),
    ],
    ids=str,
)
def test_what_is_wrong_is_a_line_and_the_exit_code(
    found: Cell, problem: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert found.problem(0.02) == problem
    assert report([found], 0.004, 0.02, tmp_path / "observing.json") == (0 if problem is None else 1)
    assert (f"PROBLEM: {problem}" in capsys.readouterr().out) == (problem is not None)
    cells = json.loads((tmp_path / "observing.json").read_text())["cells"]
    assert [one["num_sequences"] for one in cells] == ([8] if found.ratios else [])


def test_an_engine_in_another_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "--engine-process"]) == 1
    assert "engine_process" in capsys.readouterr().err
