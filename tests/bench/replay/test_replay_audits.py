"""``truedraft replay`` of an audit's record: its parameters, both of its outputs, and what may be wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.replay.record import AuditRecord, read_record
from bench.replay.replay import audit_request
from scheduler.audit import AuditCase, AuditFinding
from scheduler.request import ChoiceSpec, ChoiceTiming, EngineRequest
from server.audits import AuditReporter, params_from_json, params_to_json
from server.commands import CommandError
from server.service import Service
from specdec.params import SamplingParams
from tests.bench.replay.builders import said, write
from tests.server.builders import MODEL_NAME

PARAMS = SamplingParams(
    seed=2**64 - 1,
    temperature=0.7,
    logit_bias=((4, 1.5),),
    stop_token_ids=frozenset({1, 2}),
    bad_words=((5, 6), (7,)),
    allowed_token_ids=None,
    max_tokens=6,
)


def test_parameters_survive_the_way_through_json() -> None:
    for params in (PARAMS, replace(PARAMS, allowed_token_ids=(3, 9), logit_bias=()), SamplingParams(seed=0)):
        assert params_from_json(json.loads(json.dumps(params_to_json(params)))) == params


def test_an_audits_record_tells_which_of_the_two_outputs_comes_again(
    fresh: Callable[[], Service], tmp_path: Path
) -> None:
    request = EngineRequest("r", (70, 71, 72, 73), (ChoiceSpec(1, PARAMS),), arrival_time=0.0, stop=("zzz",))
    timing = ChoiceTiming(0.0, 0.0, 0.0, 0.0, 4, 0, 6)

    def record(sent: tuple[int, ...], rerun: tuple[int, ...]) -> Path:
        service = fresh()
        case = AuditCase(request, 1, PARAMS, sent, "length", None, (), (), timing)
        finding = AuditFinding("mismatch", "r", 1, "token_ids", 0, 0.5, case, rerun, "length")
        reporter = AuditReporter(model=MODEL_NAME, fingerprint=service.fingerprint, level="L0", store=None)
        file = tmp_path / "record.json"
        file.write_bytes(reporter._record(finding, case))
        return file

    wrong = (0, 0, 0, 0, 0, 0)
    same, lines = said(fresh(), record(wrong, wrong))
    assert not same
    assert lines[1].endswith("; the audit's own run differs as well")
    read = read_record(tmp_path / "record.json")
    assert isinstance(read, AuditRecord)
    first = int(lines[1].split(" is ")[1].split(",")[0])
    assert first != 0
    same, lines = said(fresh(), record(wrong, (first,)), plain=True)
    assert not same
    assert lines[1].endswith("; these are the ids of the audit's own run")


AUDIT: dict[str, Any] = {
    "kind": "truedraft.audit",
    "version": 1,
    "model": MODEL_NAME,
    "system_fingerprint": "fp_other",
    "choice": 0,
    "prompt_token_ids": [70, 71, 72],
    "params": params_to_json(replace(PARAMS, max_tokens=2)),
    "stop": [],
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "token_ids": [0, 0],
    "finish_reason": "length",
    "stop_reason": None,
    "rerun_token_ids": [0],
    "rerun_finish_reason": "length",
}
ODD: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e400,
    "\x1b[2J",
    "9" * 500,
    [],
    [-1],
    [10**30],
    [1e400],
    ["a"],
    [[1]],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("field", sorted(AUDIT))
def test_an_audits_record_with_an_odd_field_is_one_line(field: str, tmp_path: Path) -> None:
    for odd in ODD:
        try:
            record = read_record(write(tmp_path, AUDIT | {field: odd}))
            if isinstance(record, AuditRecord):
                audit_request(record, plain=True)
        except CommandError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt_token_ids": []}, "its prompt is empty"),
        ({"prompt_token_ids": [10**30]}, "its prompt holds the id"),
        ({"params": {"seed": 1, "max_tokens": 10**9}}, "cannot be replayed"),
        ({"params": {"seed": 1, "max_tokens": "a"}}, "cannot be replayed"),
        ({"params": {"seed": 1, "x": 1}}, "its params are wrong"),
        ({"params": {"seed": 1, "temperature": "\x1b[2J"}}, "the request failed"),
        ({"params": {"seed": 1, "logit_bias": [[10**9, 1.0]]}}, "the request failed"),
    ],
)
def test_an_audit_that_cannot_run_is_one_line(
    change: dict[str, Any], why: str, fresh: Callable[[], Service], tmp_path: Path
) -> None:
    with pytest.raises(CommandError, match=why) as refused:
        said(fresh(), write(tmp_path, AUDIT | change))
    assert str(refused.value).isprintable()


def test_the_end_of_an_audited_request_is_compared(fresh: Callable[[], Service], tmp_path: Path) -> None:
    ids: list[int] = []
    for _ in range(2):  # the line says which id comes instead of -1
        _, lines = said(fresh(), write(tmp_path, AUDIT | {"token_ids": [*ids, -1]}))
        ids.append(int(lines[1].split(" is ")[1].split(",")[0]))
    cases: tuple[tuple[object, bool, str], ...] = (
        (None, True, "the same token_ids (2)"),
        (3, False, "stop_reason is null, and was 3"),
    )
    for stop_reason, expected, line in cases:
        same, lines = said(fresh(), write(tmp_path, AUDIT | {"token_ids": ids, "stop_reason": stop_reason}))
        assert same is expected, lines
        assert line in lines[1]
