"""A JSON object read strictly while it arrives, and the values of its members as raw text."""

from __future__ import annotations

import json
import re
from typing import Literal

Event = tuple[Literal["key", "piece", "end"], str]

_WHITESPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string
_WORD = re.compile(r"[0-9A-Za-z+.\-]*")  # a number, true, false or null
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_CLOSED_BY = {"{": "}", "[": "]"}
_HEX = frozenset("0123456789abcdefABCDEF")


class ObjectScanner:
    """Reads one JSON object (RFC 8259, no leniency) from pieces of text of any size.

    ``feed`` gives events of the object's own members: ``("key", name)``, then ``("piece", raw text)`` as often as the
    value arrives in pieces, then ``("end", "")``. What it finds, and where it fails, depends on the joined text alone.
    Each character is looked at once; depth is bounded by memory only.
    """

    __slots__ = (
        "_escape",
        "_events",
        "_expect",
        "_given",
        "_in",
        "_key",
        "_member",
        "_open",
        "_word",
        "done",
        "failed",
    )

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []
        self._expect: Literal["object", "value", "first value", "key", "first key", ":", ","] = "object"
        self._in: Literal["", "string", "key", "word"] = ""
        self._escape = 0  # in a string: 5 behind a backslash, then 4 to 1 hex digits to come
        self._word: list[str] = []
        self._key: list[str] = []  # of the object's own member, raw
        self._member = False  # in the value of the object's own member
        self._given = 0  # of that value, the text before this index was given
        self._events: list[Event] = []

    def feed(self, text: str, start: int = 0) -> tuple[int, list[Event]]:
        """Takes ``text[start:]`` up to the object's end, or to what is not JSON; returns where that is, and events."""
        self._events, self._given = [], start
        i = start
        while i < len(text) and not self.done and not self.failed:
            if self._in in ("string", "key"):
                i = self._string(text, i)
            elif self._in == "word":
                i = self._scalar(text, i)
            else:
                i = self._structure(text, i)
        if self._member:
            self._give(text, i)
        return i, self._events

    def _structure(self, text: str, i: int) -> int:
        match = _WHITESPACE.match(text, i)
        assert match is not None
        i = match.end()
        if i == len(text):
            return i
        char = text[i]
        expect = self._expect
        if expect in ("value", "first value"):
            return self._begin_value(char, text, i)
        if char == '"' and expect in ("key", "first key"):
            self._in, self._key = "key", ['"']
        elif char == ":" and expect == ":":
            self._expect = "value"
        elif char == "," and expect == ",":
            self._expect = "key" if self._open[-1] == "{" else "value"
        elif char == "{" and expect == "object":
            self._open.append("{")
            self._expect = "first key"
        elif expect in (",", "first key") and char == _CLOSED_BY[self._open[-1]]:
            self._close(text, i + 1)
        else:
            self.failed = True
            return i
        return i + 1

    def _begin_value(self, char: str, text: str, i: int) -> int:
        if char == "]" and self._expect == "first value":
            self._close(text, i + 1)
            return i + 1
        if len(self._open) == 1:
            self._member, self._given = True, i
        if char == '"':
            self._in = "string"
        elif char in "{[":
            self._open.append(char)
            self._expect = "first key" if char == "{" else "first value"
        elif char in "-0123456789tfn":
            self._in, self._word = "word", []
            return i
        else:
            self._member = self._member and len(self._open) > 1
            self.failed = True
            return i
        return i + 1

    def _close(self, text: str, end: int) -> None:
        self._open.pop()
        if self._open:
            self._end_value(text, end)
        else:
            self.done = True

    def _end_value(self, text: str, end: int) -> None:
        self._expect = ","
        if len(self._open) == 1:
            self._give(text, end)
            self._events.append(("end", ""))
            self._member = False

    def _give(self, text: str, end: int) -> None:
        if end > self._given:
            self._events.append(("piece", text[self._given : end]))
        self._given = end

    def _scalar(self, text: str, i: int) -> int:
        match = _WORD.match(text, i)
        assert match is not None
        self._word.append(match[0])
        end = match.end()
        if end < len(text):
            self._in = ""
            if _SCALAR.fullmatch("".join(self._word)):
                self._end_value(text, end)
            else:
                self.failed = True
        return end

    def _string(self, text: str, i: int) -> int:
        if self._escape:
            return self._in_escape(text, i)
        match = _PLAIN.match(text, i)
        assert match is not None
        end = match.end()
        if self._in == "key":
            self._key.append(match[0])
        if end == len(text):
            return end
        char = text[end]
        if char == "\\":
            self._escape = 5
        elif char != '"':
            self.failed = True  # a control character
            return end
        if self._in == "key":
            self._key.append(char)
        if char == '"':
            self._end_string(text, end + 1)
        return end + 1

    def _in_escape(self, text: str, i: int) -> int:
        char = text[i]
        if self._escape == 5:
            if char not in '"\\/bfnrtu':
                self.failed = True
                return i
            self._escape = 4 if char == "u" else 0
        elif char in _HEX:
            self._escape -= 1
        else:
            self.failed = True
            return i
        if self._in == "key":
            self._key.append(char)
        return i + 1

    def _end_string(self, text: str, end: int) -> None:
        if self._in == "string":
            self._in = ""
            self._end_value(text, end)
            return
        self._in = ""
        self._expect = ":"
        if len(self._open) == 1:
            self._events.append(("key", json.loads("".join(self._key))))
