"""One tool call, read while it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from server.tools.scan import ObjectScanner

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME = 64
MAX_HEAD = 512  # a plain head is much shorter
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([A-Za-z0-9_\-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')


class CallReader:
    """Reads ``{"name": ..., "arguments": {...}}``; or, given a name, the arguments' object alone.

    The arguments may also come as a string that holds the object (some models write them so), as null or not at all
    (an empty object); of members of one name the last counts, as everywhere in JSON.
    """

    __slots__ = ("_arguments", "_head", "_key", "_name", "_name_given", "_scanner", "_taken", "name")

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self._name_given = name is not None
        self._scanner = ObjectScanner()
        self._key = ""
        self._name: list[str] = []  # raw
        self._arguments: list[str] = []  # raw
        self._taken = 0  # of the pieces in _arguments
        self._head = ""  # the object's text up to the arguments, as long as it may be a plain head

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def failed(self) -> bool:
        return self._scanner.failed

    def feed(self, text: str) -> int:
        """Takes text up to the call's end, or to what is not JSON; returns how much."""
        end, events = self._scanner.feed(text)
        if self._name_given:
            self._arguments.append(text[:end])
            return end
        if len(self._head) < MAX_HEAD:
            self._head += text[: min(end, MAX_HEAD)]
        for kind, value in events:
            if kind == "key":
                self._begin_member(value)
            elif kind == "piece" and self._key in ARGUMENT_KEYS:
                self._arguments.append(value)
            elif kind == "piece" and self._key == "name":
                self._name.append(value)
            elif kind == "end" and self._key == "name":
                self.name = _name("".join(self._name))
        return end

    def _begin_member(self, key: str) -> None:
        self._key = key
        if key == "name":
            self.name, self._name = None, []
        elif key in ARGUMENT_KEYS:
            self._arguments, self._taken = [], 0

    def begun(self, names: Collection[str]) -> bool:
        """Whether it is, so far, exactly what a grammar lets begin: a known name, then an object as arguments."""
        if self._name_given:
            return self.name in names and bool(self._arguments)
        head = _HEAD.match(self._head)
        return head is not None and head[1] in names

    def take(self) -> str:
        """The arguments' raw text that came since the last time."""
        piece = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return piece

    def whole(self, names: Collection[str]) -> str | None:
        """The arguments of a call that is done, an object; None if it is no valid call of one of ``names``."""
        if self.name not in names:
            return None
        raw = "".join(self._arguments)
        if raw.startswith('"'):
            text = str(json.loads(raw)).strip()
            scanner = ObjectScanner()
            end, _ = scanner.feed(text)
            return text if scanner.done and end == len(text) else None
        if raw.startswith("{"):
            return raw
        return "{}" if raw in ("", "null") else None


def _name(raw: str) -> str | None:
    """The name that a member's raw value says; None if it is none."""
    if not raw.startswith('"') or len(raw) > 2 + 6 * MAX_NAME:  # every character may be an escape
        return None
    name = json.loads(raw)
    return name if isinstance(name, str) else None
