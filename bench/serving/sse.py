"""Server-sent events out of the pieces of a body, wherever these are cut."""

from __future__ import annotations

MAX_LINE_BYTES = 2**22


class StreamError(RuntimeError):
    """What came is no stream of events; the message is fit for a terminal."""


class EventReader:
    """Takes the pieces of a body and gives the data of each event that is complete.

    Lines end in LF or CRLF; comments and other fields than ``data`` are skipped. An event whose blank line has not
    come is not given: the stream was cut there.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises StreamError for a line without an end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise StreamError(f"a line of the stream is longer than {MAX_LINE_BYTES:,} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
