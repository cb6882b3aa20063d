"""bench.quantize: its figures are those of the models it was given, and the command prints them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.quantize.__main__ import main
from bench.quantize.quality import TEXT, greedy_answers, on_answers, on_text
from bench.quantize.speed import DECODED, PREFILLED, interleaved_forwards
from bench.tiny_models import save_tiny_model
from model.fused import FusedExecutor
from model.int8 import Quantize
from tests.model.kernel_builders import fused_executor, tiny_model, token_ids


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(quantize: Quantize = "none", name: str = "llama") -> FusedExecutor:
    return fused_executor(tiny_model(name), kernels=False, quantize=quantize)


def test_a_model_does_not_differ_from_itself() -> None:
    (ids,) = token_ids([700], 131)  # more than one window
    found = on_text(tiny(), tiny(), ids)
    assert found.tokens == 698
    assert found.perplexity == found.reference_perplexity
    assert (found.same_best, found.divergence) == (1.0, 0.0)
    prompts = [tuple(ids[:20]), tuple(ids[20:27])]
    answers = greedy_answers(tiny(), prompts, 6)
    same = on_answers(tiny(), answers)
    assert (same.same_prefix, same.same_answers, same.same_best) == (1.0, 1.0, 1.0)


def test_another_model_is_seen_to_be_one() -> None:
    (ids,) = token_ids([60], 131)
    found = on_text(tiny(name="qwen2"), tiny(), ids)
    assert found.perplexity != found.reference_perplexity
    assert found.same_best < 0.5
    assert found.divergence > 0.5
    other = on_answers(tiny(name="qwen2"), greedy_answers(tiny(), [tuple(ids[:20])], 6))
    assert other.same_prefix < 1.0
    assert other.same_answers == 0.0


def test_int8_is_nearer_than_another_model() -> None:
    (ids,) = token_ids([60], 131)
    int8, other = (on_text(executor, tiny(), ids) for executor in (tiny("int8"), tiny(name="qwen2")))
    assert 0.0 < int8.divergence < 0.1 * other.divergence


def test_forwards_of_both_models_are_timed_with_each_number_of_rows() -> None:
    ticks = iter(range(10**6))
    pairs = interleaved_forwards(tiny(), tiny("int8"), rounds=1, clock=lambda: float(next(ticks)))
    assert [pair.rows for pair in pairs] == [*DECODED, *PREFILLED]
    assert {(pair.plain, pair.quantized, pair.ratio) for pair in pairs} == {(1.0, 1.0, 1.0)}


def test_the_command_prints_both_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("bench.quantize.speed.DECODED", (1, 2))
    folder = save_tiny_model("llama", tmp_path / "model", max_position_embeddings=64, num_hidden_layers=1)
    options = ["--model", str(folder), "--kernels", "torch", "--tokens", "3", "--prompts", "1", "--rounds", "1"]
    assert main(options) == 0
    printed = capsys.readouterr().out
    for part in ("fused/torch against fused/torch-int8", "| perplexity |", "copy, 1 answers | 3 |", "times as fast"):
        assert part in printed


def test_a_model_that_cannot_be_quantised_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model("gpt2", tmp_path / "model", n_positions=64)
    assert main(["--model", str(folder), "--kernels", "torch"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


def test_the_text_is_long_enough_to_tell_small_differences() -> None:
    assert len(TEXT.read_text("utf-8").split()) > 2000
