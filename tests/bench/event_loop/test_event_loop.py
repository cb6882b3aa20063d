"""The measurement of the event loop sees a pause, says what is wrong, and its loads are what they are said to be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest

from bench.event_loop.__main__ import CASES, IDLE, STREAMS, Plan, Result, chosen_cases, main, measure, report
from bench.event_loop.loads import CHAT, COMPLETIONS, LOADS, loads_of, stream
from bench.event_loop.probe import Lag, LoopProbe
from server.body import parse_json_object
from server.chat.schema import parse_chat
from server.errors import APIError
from server.schemas import parse_completion
from server.settings import Settings
from server.tokenizing import parse_detokenize, parse_tokenize
from tests.server.builders import MODEL_NAME, build_service, save_tiny_model
from tests.server.chat_builders import save_chat_model


def test_a_pause_is_seen_in_full_and_forgotten_with_the_next_watch() -> None:
    async def run() -> tuple[Lag, Lag]:
        probe = LoopProbe()
        async with probe.watching():
            await asyncio.sleep(0.005)
            time.sleep(0.2)  # noqa: ASYNC251 - the pause
        paused = probe.lag
        async with probe.watching():
            await asyncio.sleep(0.005)
        return paused, probe.lag

    paused, after = asyncio.run(run())
    assert paused.max_ms >= 190
    assert after.max_ms < paused.max_ms
    assert paused.wakes > 0


def result(**changes: object) -> Result:
    values: dict[str, object] = {"case": "schemas", "answers": {"200": 3, "400": 9, "503": 1}, "lag": Lag(9, 0, 1, 99)}
    return Result(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"case": IDLE, "answers": {}}, None),
        ({"lag": Lag(9, 0, 1, 101)}, "schemas: the loop came 101 ms late; 100 are allowed"),
        ({"answers": {"200": 3, "500": 1}}, "schemas: the server failed: {'500': 1}"),
        ({"answers": {"ReadTimeout": 1}}, "schemas: the server failed: {'ReadTimeout': 1}"),
        ({"answers": {}}, "schemas: nothing was measured"),
        ({"lag": Lag(0, 0, 0, 0)}, "schemas: nothing was measured"),
    ],
    ids=str,
)
def test_what_is_wrong_is_a_line_and_the_exit_code(
    changes: dict[str, object], problem: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = result(**changes)
    assert found.problem(100) == problem
    assert report([found], 100, tmp_path / "lag.json") == (0 if problem is None else 1)
    assert (f"PROBLEM: {problem}" in capsys.readouterr().out) == (problem is not None)
    assert json.loads((tmp_path / "lag.json").read_text())["results"][0]["case"] == found.case


PARSERS = {
    COMPLETIONS: parse_completion,
    CHAT: parse_chat,
    "/tokenize": parse_tokenize,
    "/detokenize": parse_detokenize,
}


@pytest.mark.parametrize("name", LOADS)
def test_every_request_is_another_one_within_the_cap_and_of_fields_that_exist(name: str) -> None:
    for load in (*LOADS[name].values(), stream):
        (path, first), (_, second) = load(0), load(1)
        assert first != second
        content = json.dumps({"model": "m", **first}).encode()
        assert len(content) <= Settings.model_fields["max_body_bytes"].default
        with contextlib.suppress(APIError):  # many are refused, but never for a field that does not exist
            PARSERS[path](parse_json_object(content))
        for body in (first, second):
            short = {field: value for field, value in body.items() if len(str(value)) < 200}
            try:
                PARSERS[path](parse_json_object(json.dumps({"model": "m", **short}).encode()))
            except APIError as error:
                assert error.code != "unknown_parameter", error.message


def test_loads_apart_are_the_loads_of_their_groups_one_by_one() -> None:
    apart = chosen_cases(CASES, apart=True)
    assert chosen_cases(CASES, apart=False) == [IDLE, STREAMS, *LOADS]
    assert apart[:3] == [IDLE, STREAMS, "schemas: product"]
    for group in LOADS:
        assert tuple(load for case in apart if case.startswith(f"{group}: ") for load in loads_of(case)) == loads_of(
            group
        )
    assert loads_of(STREAMS) == loads_of("schemas: none") == ()


def test_every_case_is_measured_while_its_requests_are_answered(tmp_path: Path) -> None:
    model = save_chat_model(save_tiny_model(tmp_path / "tiny"), tmp_path / "model")
    service = build_service(model, tmp_path / "home")
    cases = (IDLE, STREAMS, "long answers")
    results = asyncio.run(measure(service, Plan(cases, seconds=0.2, workers=5, streams=1)))
    assert [found.case for found in results] == list(cases)
    assert all(found.lag.wakes > 0 for found in results)
    assert results[0].answers == {}
    assert results[1].answers.keys() == {"200"}
    assert sum(results[2].answers.values()) >= 6
    assert all(found.problem(limit_ms=1e9) is None for found in results), results


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", IDLE, "--", "--model", "/nowhere", "--served-model-name", MODEL_NAME]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert set(LOADS) < set(CASES)
