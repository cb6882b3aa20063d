"""The log's queue: nobody waits for its reader, what is dropped is told, and nothing else is lost."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from server.log_queue import REQUEST_IDS, QueuedHandler, flush_log, num_dropped_lines
from server.logs import JsonFormatter, TextFormatter


class StuckStream(io.StringIO):
    """As a pipe whose reader has stopped: a write blocks until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.writing.set()
        assert self.goes_on.wait(60)
        return super().write(text)


Make = Callable[..., tuple[logging.Logger, QueuedHandler]]


@pytest.fixture
def make() -> Iterator[Make]:
    """A logger of its own whose lines go to ``stream`` as JSON."""
    made: list[tuple[logging.Logger, QueuedHandler]] = []

    def _make(stream: io.StringIO, **bounds: int) -> tuple[logging.Logger, QueuedHandler]:
        handler = QueuedHandler(stream, **bounds)
        handler.setFormatter(JsonFormatter())
        logger = logging.getLogger(f"test.log_queue.{len(made)}")
        logger.propagate = False
        logger.setLevel("DEBUG")
        logger.addHandler(handler)
        made.append((logger, handler))
        return logger, handler

    yield _make
    for logger, handler in made:
        logger.removeHandler(handler)
        handler.close()


def entries(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_lines_are_written_whole_and_in_order(make: Make) -> None:
    stream = io.StringIO()
    logger, handler = make(stream)
    for i in range(500):
        logger.info("line %d", i, extra={"number": i})
    handler.flush(60)
    assert [entry["message"] for entry in entries(stream)] == [f"line {i}" for i in range(500)]
    assert [entry["number"] for entry in entries(stream)] == list(range(500))


def test_a_reader_who_has_stopped_holds_nobody_up_and_what_was_dropped_is_told(make: Make) -> None:
    stream = StuckStream()
    logger, handler = make(stream, max_lines=3)
    for i in range(10):  # would never end if it waited
        logger.info("line %d", i)
    assert handler.num_dropped == 7
    stream.goes_on.set()
    handler.flush(60)
    messages = [entry["message"] for entry in entries(stream)]
    assert [message for message in messages if str(message).startswith("line ")] == ["line 0", "line 1", "line 2"]
    (told,) = [entry for entry in entries(stream) if "dropped" in entry]
    assert (told["dropped"], told["level"]) == (7, "warning")
    logger.info("line 10")
    handler.flush(60)
    assert entries(stream)[-1]["message"] == "line 10"
    assert handler.num_dropped == 7


def test_long_lines_are_bounded_in_characters_but_one_always_goes(make: Make) -> None:
    stream = StuckStream()
    logger, handler = make(stream, max_chars=100)
    logger.info("x" * 1000)
    logger.info("y")
    assert handler.num_dropped == 1
    stream.goes_on.set()
    handler.flush(60)
    assert entries(stream)[0]["message"] == "x" * 1000


def test_a_record_is_as_it_was_when_it_was_logged(make: Make) -> None:
    stream = StuckStream()
    logger, handler = make(stream)
    numbers = [1]
    logger.info("%s", numbers)
    numbers.append(2)
    stream.goes_on.set()
    handler.flush(60)
    assert entries(stream)[0]["message"] == "[1]"


def test_an_exception_waits_in_words_and_keeps_no_frame_alive(make: Make) -> None:
    stream = StuckStream()
    _, handler = make(stream)
    held = threading.Event()  # stands for a tensor in a frame that raised
    seen = weakref.ref(held)

    def fail(local: threading.Event) -> None:
        raise ValueError("it failed")

    try:
        fail(held)
    except ValueError:
        handler.handle(logging.makeLogRecord({"msg": "caught", "exc_info": sys.exc_info()}))
    del held
    assert seen() is None
    stream.goes_on.set()
    handler.flush(60)
    (entry,) = entries(stream)
    assert "ValueError: it failed" in str(entry["exception"])


def test_a_line_has_the_ids_of_the_request_it_was_written_for(make: Make) -> None:
    stream = io.StringIO()
    logger, handler = make(stream)
    token = REQUEST_IDS.set({"request_id": "r1", "trace_id": "t1"})
    logger.info("inside")
    logger.info("of another", extra={"request_id": "r2"})
    REQUEST_IDS.reset(token)
    logger.info("outside")
    handler.flush(60)
    inside, other, outside = entries(stream)
    assert (inside["request_id"], inside["trace_id"]) == ("r1", "t1")
    assert other["request_id"] == "r2"
    assert "request_id" not in outside


def test_a_line_that_cannot_be_made_hurts_neither_the_caller_nor_the_next(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    _, handler = make(stream)
    handler.handle(logging.makeLogRecord({"msg": "%d", "args": ("no number",)}))
    handler.handle(logging.makeLogRecord({"msg": "fine"}))
    handler.flush(60)
    assert [entry["message"] for entry in entries(stream)] == ["fine"]
    assert "Logging error" in capsys.readouterr().err


def test_a_stream_that_fails_does_not_end_the_log(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)

    class Broken(io.StringIO):
        broken = True

        def write(self, text: str) -> int:
            if self.broken:
                raise OSError("gone")
            return super().write(text)

    stream = Broken()
    logger, handler = make(stream)
    logger.info("lost")
    handler.flush(60)
    stream.broken = False
    logger.info("there")
    handler.flush(60)
    assert [entry["message"] for entry in entries(stream)] == ["there"]


def test_closing_writes_what_waits_and_takes_nothing_more(make: Make) -> None:
    stream = io.StringIO()
    logger, handler = make(stream)
    logger.info("last")
    handler.close()
    logger.info("later")
    assert [entry["message"] for entry in entries(stream)] == ["last"]
    assert handler.num_dropped == 1


def test_the_process_knows_its_own_log(make: Make) -> None:
    stream = StuckStream()
    _, handler = make(stream, max_lines=1)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        for _ in range(3):
            logging.getLogger("test.log_queue.root").warning("said")
        assert num_dropped_lines() == 2
        stream.goes_on.set()
        flush_log(60)
        assert "said" in stream.getvalue()
    finally:
        root.removeHandler(handler)


def test_text_lines_have_the_exception_below() -> None:
    stream = io.StringIO()
    handler = QueuedHandler(stream)
    handler.setFormatter(TextFormatter())
    record = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "name": "n", "exc_text": "Trace\nback"})
    handler.handle(record)
    handler.close()
    assert stream.getvalue().endswith("error n: failed\nTrace\nback\n")
