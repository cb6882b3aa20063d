"""bench.quick against a real server: every line of its table, and the comparison of outputs."""

from __future__ import annotations

import pytest

from bench import quick
from bench.prompts import COPY_LOAD, MIXED_LOAD, VARIED
from tests.server.builders import build_service, running, save_tiny_model


def test_it_measures_off_and_on_and_compares_their_outputs(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("tiny")
    service = build_service(save_tiny_model(folder), tmp_path_factory.mktemp("home"), num_blocks=1024)
    with running(service) as url:
        flags = ["--concurrency", "1", "3", "--prompts", "3", "--rounds", "1", "--tokens", "6", "--workloads", "mixed"]
        assert quick.main(["--url", url, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.strip().startswith("mixed")]
    assert [(row[1], row[2]) for row in table] == [("1", "off"), ("1", "on"), ("3", "off"), ("3", "on")]
    assert all(float(row[3]) > 0 for row in table)
    assert "6 of 6 requests identical" in lines[-1] or "7 of 7 requests identical" in lines[-1]


def test_the_prompt_sets_are_what_they_say() -> None:
    assert len(VARIED) == 32
    assert len({prompt.text for prompt in VARIED}) == 32
    assert len(MIXED_LOAD) == len(COPY_LOAD) == 16
