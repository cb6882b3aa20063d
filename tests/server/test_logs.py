"""Which lines reach the log at which level."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

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
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    for level in LEVELS:
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level.upper()], "said at %s", level)
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
