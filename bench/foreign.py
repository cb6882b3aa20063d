"""What comes from outside (files, other servers): read within bounds, and shown without harm to a terminal."""

from __future__ import annotations

import contextlib
import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

STDIN = Path("-")


class ForeignError(ValueError):
    """What came cannot be used; the message is one line, fit for a terminal."""


def shown(value: object, limit: int = 200) -> str:
    """``value`` as it may stand in one of our lines: at most about ``limit`` characters, none of which controls a
    terminal or forges a line (they are escaped as in Python: a line feed is ``\\n``)."""
    text = value if isinstance(value, str) else _text(value)
    kept = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text[:limit]
    )
    return kept if len(text) <= limit else kept + "…"


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 512:  # Python refuses to print very long ones
        return "a number of more than 150 digits"
    return str(value)


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8; strings are valid Unicode. Raises ForeignError ("is not ...")."""
    try:
        value = json.loads(data.decode("utf-8"))
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ForeignError("is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise ForeignError("is not valid Unicode: it holds a lone surrogate") from error
    except json.JSONDecodeError as error:
        raise ForeignError(f"is not JSON: {shown(str(error))}") from error
    except RecursionError as error:
        raise ForeignError("is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ForeignError("is not JSON that can be read: it holds a number that is too long") from error
    return value


def read_file(path: Path, limit: int) -> bytes:
    """All of a regular file, or of standard input for ``-``. Raises ForeignError if it is no such file, or larger than
    ``limit`` bytes; OSError."""
    with _open(path) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ForeignError(f"is larger than {limit:,} bytes")
    return data


def read_lines(path: Path, limit: int) -> Iterator[bytes | None]:
    """The lines of a regular file, or of standard input for ``-``, one after the other; None for a line of more than
    ``limit`` bytes. Raises ForeignError if it is no such file; OSError."""
    with _open(path) as stream:
        while line := stream.readline(limit + 1):
            if len(line) <= limit or line.endswith(b"\n"):
                yield line
                continue
            while (more := stream.readline(limit)) and not more.endswith(b"\n"):
                pass
            yield None


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    if path == STDIN:
        yield sys.stdin.buffer
        return
    if not stat.S_ISREG(path.stat().st_mode):  # a device may never end, a pipe may never begin
        raise ForeignError("is not a regular file (- is standard input)")
    with path.open("rb") as stream:
        yield stream
