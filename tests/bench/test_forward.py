"""``python -m bench.forward`` on a tiny model: what it measures and how it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bench.forward import SAMPLING, in_turns, main, weight_bytes
from tests.server.builders import save_tiny_model


def test_medians_are_of_every_round_but_the_first() -> None:
    now = 0.0
    lasts = iter([100.0, 1.0, 5.0, 2.0])

    def one() -> None:
        nonlocal now
        now += next(lasts)

    assert in_turns({"one": one}, 3, clock=lambda: now) == {"one": 2.0}


@pytest.mark.parametrize(("head", "expected"), [(False, 10 * 4 * 2 + 6 * 4), (True, 10 * 4 * 2 + 6 * 4)])
def test_an_embedding_counts_only_if_it_is_the_head(head: bool, expected: int, tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10, 4, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(6, dtype=torch.float32),
    }
    if head:
        tensors["lm_head.weight"] = torch.zeros(10, 4, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path) == expected


def test_every_table_is_measured_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model")
    assert main(["--model", str(folder), "--rounds", "1", "--json", str(tmp_path / "out.json")]) == 0
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["one_row_bandwidth_share"] > 0
    assert list(found["sampling_s"]) == ["forward", *SAMPLING]
    assert all(row in told for row in (*SAMPLING, "GB/s", "context (16 sequences)"))


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path / "nowhere")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("forward: ")
    assert "nowhere" in lines[-1]
