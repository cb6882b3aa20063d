"""Which lines reach the log at which level."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.log_queue import QueuedHandler, flush_log
from server.logs import configure_logging

LEVELS = ("debug", "info", "warning", "error")
OURS = ("truedraft.run", "model.loader", "specdec.step", "scheduler.engine", "kvcache.pool")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    names = ("truedraft", "model", "specdec", "scheduler", "kvcache", "uvicorn", "uvicorn.error", "uvicorn.access")
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for handler in root.handlers:
        if isinstance(handler, QueuedHandler):
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    for level in LEVELS:
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level.upper()], "said at %s", level)
    flush_log(60)
    text = capsys.readouterr().err
    return [level for level in LEVELS if f"said at {level}" in text]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_room_is_heard_from_the_level_on(name: str, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(level, "text")
    assert shown(name, capsys) == list(LEVELS[LEVELS.index(level) :])


@pytest.mark.parametrize("level", LEVELS)
def test_libraries_are_heard_when_they_warn_unless_only_errors_are_wanted(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(level, "text")
    assert shown("some.package", capsys) == (["error"] if level == "error" else ["warning", "error"])


def test_the_log_can_be_configured_again_and_the_one_before_ends(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "text")
    (before,) = logging.getLogger().handlers
    configure_logging("info", "json")
    (after,) = logging.getLogger().handlers
    logging.getLogger("truedraft.run").info("once")
    before.handle(logging.makeLogRecord({"msg": "too late"}))
    flush_log(60)
    shown = capsys.readouterr().err
    assert shown.count("once") == 1
    assert "too late" not in shown
    assert isinstance(after, QueuedHandler)
