"""Server-sent events out of the pieces of a body, wherever these are cut."""

from __future__ import annotations

MAX_LINE_BYTES = 2**22


class StreamError(RuntimeError):
    """What came is no stream of events."""


class EventReader:
    """Collects pieces and gives the data of every event that is complete.

    ::

        "data: {...}\\n\\ndata: {.."     one event, and a part of the next: it waits for the pieces to come

    Lines end in LF; a CR in front of it is dropped, for servers that write CRLF. Comments and fields other than
    ``data`` are skipped. An event without its blank line is never given: the stream was cut.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that ``piece`` completes, in order. Raises StreamError for a line without an end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise StreamError(f"a line of the stream is longer than {MAX_LINE_BYTES:,} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
