"""A logging handler that nobody waits for: a bounded queue, and a thread that makes the lines and writes them."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from queue import SimpleQueue
from types import MappingProxyType
from typing import TextIO

MAX_WAITING_LINES = 10_000
MAX_WAITING_CHARS = 64 * 1024**2  # of their messages: with --log-prompts these are long
FLUSH_SECONDS = 1.0

# What every line says that is logged while a request is served: its ids. Of a task and those that it starts.
REQUEST_IDS: ContextVar[Mapping[str, str]] = ContextVar("request_ids", default=MappingProxyType({}))


class QueuedHandler(logging.Handler):
    """Takes a record with its message made and its request's ids, and leaves the rest to its thread.

    A reader of ``stream`` who stops reading holds up that thread alone. What finds no room is dropped and counted;
    a line says how many, as soon as lines are written again.
    """

    def __init__(
        self, stream: TextIO, *, max_lines: int = MAX_WAITING_LINES, max_chars: int = MAX_WAITING_CHARS
    ) -> None:
        super().__init__()
        self.num_dropped = 0  # since the start
        self._stream = stream
        self._max_lines = max_lines
        self._max_chars = max_chars
        self._num_lines = 0  # that wait or are being written; with the next two, under the handler's lock
        self._num_chars = 0
        self._num_untold = 0  # dropped, and no line has said so
        self._closed = False
        # Its ``put`` may be interrupted by a signal's handler that logs, too; that of queue.Queue may not.
        self._queue: SimpleQueue[logging.LogRecord | threading.Event | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Under the handler's lock."""
        try:
            taken = self._taken(record)
        except Exception:  # as logging's own handlers do: a line that cannot be made is not the caller's trouble
            self.handleError(record)
            return
        size = len(taken.msg) + len(taken.exc_text or "")
        full = self._num_lines >= self._max_lines or self._num_chars + size > self._max_chars
        if self._closed or (full and self._num_lines):
            self.num_dropped += 1
            self._num_untold += 1
            return
        self._num_lines += 1
        self._num_chars += size
        self._queue.put(taken)

    def flush(self, timeout: float = FLUSH_SECONDS) -> None:
        """Wait until all lines so far are written, at most ``timeout`` seconds: the stream may be stuck."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            written = threading.Event()
            self._queue.put(written)
            written.wait(timeout)

    def close(self) -> None:
        """Write what waits, as ``flush`` does; what is logged later is dropped. May be called again."""
        with self.lock or contextlib.nullcontext():
            closed, self._closed = self._closed, True
        if not closed:
            self._queue.put(None)
            self._thread.join(FLUSH_SECONDS)
        super().close()

    def _taken(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy that may wait: it holds no argument that could change, and no frame that would be kept alive."""
        taken = copy.copy(record)
        taken.msg, taken.args = record.getMessage(), None
        if record.exc_info and not record.exc_text:
            taken.exc_text = (self.formatter or logging.Formatter()).formatException(record.exc_info)
        taken.exc_info = None
        for name, value in REQUEST_IDS.get().items():
            taken.__dict__.setdefault(name, value)
        return taken

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._write(item)
            with self.lock or contextlib.nullcontext():
                self._num_lines -= 1
                self._num_chars -= len(item.msg) + len(item.exc_text or "")
                untold, self._num_untold = self._num_untold, 0
            if untold:
                self._write(_of_dropped(untold))

    def _write(self, record: logging.LogRecord) -> None:
        try:
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()
        except Exception:  # the stream is closed, or something logged cannot be shown
            self.handleError(record)


def _of_dropped(number: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "truedraft.log",
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "lines of this log were dropped: they came faster than they could be written",
            "dropped": number,
        }
    )


def flush_log(timeout: float = FLUSH_SECONDS) -> None:
    """Wait for the lines so far, at most ``timeout`` seconds. For who leaves the process without cleaning up."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, QueuedHandler):
            handler.flush(timeout)


def num_dropped_lines() -> int:
    """Of the process's log, since it was configured; safe in any thread."""
    return sum(handler.num_dropped for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler))
