"""Log lines as text or JSON. Nothing here knows what a prompt is: texts of requests are not logged by default."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from server.log_queue import QueuedHandler

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

ROOMS = ("kvcache", "model", "specdec", "scheduler")  # whose loggers are named like their modules


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _timestamp(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str | None:
    """A record that waited has it in words already."""
    return record.exc_text or (formatter.formatException(record.exc_info) if record.exc_info else None)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(f" {name}={value}" for name, value in _extras(record).items())
        line = f"{_timestamp(record)} {record.levelname.lower()} {record.name}: {record.getMessage()}{extras}"
        exception = _exception(self, record)
        return line if exception is None else f"{line}\n{exception}"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        exception = _exception(self, record)
        if exception is not None:
            entry["exception"] = exception
        return json.dumps(entry, default=str, ensure_ascii=False)


def configure_logging(level: str, log_format: str) -> None:
    """Send the log to stderr, from a thread of its own. Called once by the command line, never on import."""
    handler = QueuedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    before, root.handlers[:] = root.handlers[:], [handler]
    for other in before:
        if isinstance(other, QueuedHandler):
            other.close()
    # Libraries are only heard when they warn.
    root.setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))
    for name in ("truedraft", *ROOMS, "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())
    # uvicorn's own lines repeat ours.
    logging.getLogger("uvicorn.error").setLevel("WARNING" if level != "debug" else "DEBUG")
    logging.getLogger("uvicorn.access").setLevel("ERROR")
