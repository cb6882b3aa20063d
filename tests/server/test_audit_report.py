"""The lines about audits that differ: never more than a reader can bear, none of them uncounted, each of them true."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.audit import AuditFinding, AuditResult
from scheduler.stats import StepRecord
from server.audit_store import AuditStore
from server.audits import FIRST_LINES, LINES_A_MINUTE, AuditReporter
from tests.scheduler.test_rerun import CASE
from tests.server.test_metrics import RECORD


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def lines() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(vars(record))  # type: ignore[method-assign]
    logger = logging.getLogger("truedraft.audit")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def reporter(clock: Clock, store: AuditStore | None = None) -> AuditReporter:
    return AuditReporter(model="m", fingerprint="fp", level="L0", store=store, clock=clock)


def found(count: int, result: AuditResult = "mismatch") -> StepRecord:
    one = AuditFinding(result, "r", 0, what="token_ids", position=1, case=CASE, rerun_token_ids=(7, 9))
    return replace(RECORD, audits=(one,) * count)


def test_the_first_lines_come_in_full_then_so_many_a_minute_and_none_is_uncounted(lines: list[dict[str, Any]]) -> None:
    clock = Clock()
    told = reporter(clock)
    told.observe(found(FIRST_LINES))
    assert len(lines) == FIRST_LINES
    assert {line["what"] for line in lines} == {"token_ids"}
    assert {line["left_out"] for line in lines} == {0}
    for minute in range(1, 11):
        for _ in range(60):
            clock.now += 1.0
            told.observe(found(7))
        assert len(lines) <= FIRST_LINES + minute * LINES_A_MINUTE
    assert len(lines) >= FIRST_LINES + 10 * LINES_A_MINUTE - 1
    told.close()
    assert sum(line["left_out"] + ("what" in line) for line in lines) == FIRST_LINES + 600 * 7


def test_what_was_left_out_is_told_when_nothing_more_comes(lines: list[dict[str, Any]]) -> None:
    clock = Clock()
    told = reporter(clock)
    told.observe(found(FIRST_LINES + 5))
    clock.now = 59.0
    told.observe(found(0))
    assert len(lines) == FIRST_LINES
    clock.now = 61.0
    for _ in range(3):
        told.observe(found(0))
    assert [line["left_out"] for line in lines[FIRST_LINES:]] == [5]
    assert lines[-1]["levelname"] == "ERROR"
    told.close()
    assert len(lines) == FIRST_LINES + 1


def test_near_ties_do_not_keep_a_mismatch_out(lines: list[dict[str, Any]]) -> None:
    told = reporter(Clock())
    told.observe(found(10 * FIRST_LINES, "near_tie"))
    told.observe(found(1))
    assert [line["levelname"] for line in lines] == ["WARNING"] * FIRST_LINES + ["ERROR"]


def test_a_line_names_its_record_when_that_is_there_and_none_that_is_not(
    tmp_path: Path, lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    handler = logging.Handler()
    handler.emit = lambda record: there.append(  # type: ignore[method-assign]
        record.record is None or (tmp_path / "store" / record.record).is_file()  # type: ignore[attr-defined]
    )
    logger = logging.getLogger("truedraft.audit")
    logger.addHandler(handler)
    told = reporter(Clock(), AuditStore(tmp_path / "store", max_files=100, max_bytes=100_000))
    told.observe(found(3))
    told.close()
    logger.removeHandler(handler)
    assert there == [True] * 3
    assert len({line["record"] for line in lines}) == 3
    told = reporter(Clock(), AuditStore(tmp_path / "store", max_files=100, max_bytes=100))  # none fits
    told.observe(found(1))
    assert lines[-1]["record"] is None


def test_records_are_kept_of_findings_without_a_line(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    told = reporter(Clock(), AuditStore(tmp_path, max_files=3, max_bytes=100_000))
    for _ in range(5 + FIRST_LINES):
        told.observe(found(1))
        told.store._thread.submit(lambda: None).result()  # type: ignore[union-attr]
    told.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert lines[-1]["left_out"] == 5


def test_a_finding_that_cannot_be_told_does_not_hide_the_next(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = reporter(Clock())
    bad = replace(found(1).audits[0], case=replace(CASE, token_ids=None))  # type: ignore[arg-type]
    told.observe(replace(RECORD, audits=(bad, *found(1).audits)))
    assert [line["msg"].split("%")[0] for line in lines] == ["an audit found a "] * 2
    assert lines[1]["position"] == 1
