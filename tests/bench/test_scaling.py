"""``python -m bench.scaling`` on tiny models: which steps it counts, and what it tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scaling
from bench.scaling import StepTimes, by_vocabulary, decode_times, main, median_of
from model.loader import LoadedModel, load_model
from tests.server.builders import save_tiny_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("scaling")
    return load_model(save_tiny_model(folder / "model"), executor="generic", num_threads=1, home=folder)


@pytest.mark.parametrize(("requests", "context"), [(1, 5), (7, 100), (16, 64)])
def test_only_steps_in_which_all_requests_decode_are_counted(loaded: LoadedModel, requests: int, context: int) -> None:
    found = decode_times(loaded, requests=requests, context=context, tokens=6, temperature=0.0)
    prefill = -(-requests * context // scaling.MAX_BATCHED_TOKENS)
    assert 6 <= found.steps <= 6 + prefill
    assert found.forward > 0
    assert found.sampling > 0
    assert found.forward + found.sampling < found.step


def test_a_line_has_the_medians_of_its_runs() -> None:
    runs = [StepTimes(3, 0.5, 0.3, 0.1), StepTimes(4, 0.4, 0.2, 0.15), StepTimes(5, 9.0, 0.1, 0.05)]
    assert median_of(runs) == StepTimes(12, 0.5, 0.2, 0.1)


def test_a_larger_vocabulary_is_another_model_with_the_same_layers() -> None:
    found = by_vocabulary((331, 997), 2, 1, kernels=None, threads=1, shape={"num_hidden_layers": 1})
    assert list(found) == [331, 997]
    assert all(times.steps >= 2 for both in found.values() for times in both.values())


def test_every_table_is_measured_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"REQUESTS": (1, 4), "CONTEXTS": (20, 60, 100_000), "VOCABULARIES": (331,)}.items():
        monkeypatch.setattr(scaling, name, value)
    monkeypatch.setattr(scaling, "by_vocabulary", lambda *args, **options: {331: _both()})
    folder, out = save_tiny_model(tmp_path / "model"), tmp_path / "out.json"
    assert main(["--model", str(folder), "--rounds", "1", "--tokens", "2", "--json", str(out), "--threads", "1"]) == 0
    told = capsys.readouterr().out
    assert all(head in told for head in ("requests", "context (4 requests)", "vocabulary (16 requests)"))
    found = json.loads(out.read_text())
    assert list(found["requests_s"]) == ["1", "4"]
    assert list(found["contexts_s"]) == ["20", "60"]
    assert found["vocabularies_s"]["331"]["greedy"]["forward"] > 0


def _both() -> dict[str, StepTimes]:
    return {name: StepTimes(1, 0.5, 0.3, 0.1) for name in ("greedy", "temperature")}


def test_a_model_that_is_not_there_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path / "nowhere")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("scaling: ")
    assert "nowhere" in lines[-1]
