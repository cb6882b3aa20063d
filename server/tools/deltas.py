"""What an answer with tool calls is made of, piece by piece, and the whole that the pieces join to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; ``index`` counts the calls of the answer from 0. Exactly one for each call."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments, which joined are JSON as the model wrote it."""

    index: int
    text: str


Delta = Content | CallStart | Arguments


def delta_body(delta: Delta) -> dict[str, Any]:
    """As the ``delta`` of a streamed choice."""
    match delta:
        case Content(text):
            return {"content": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def merged_body(deltas: Sequence[Delta]) -> dict[str, Any]:
    """Several deltas as one ``delta``, from which a client joins the same; empty without any."""
    contents = [delta.text for delta in deltas if isinstance(delta, Content)]
    body: dict[str, Any] = {"content": "".join(contents)} if contents else {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        match delta:
            case CallStart(index):
                (calls[index],) = delta_body(delta)["tool_calls"]
            case Arguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return body | ({"tool_calls": list(calls.values())} if calls else {})


@dataclass(slots=True)
class JoinedDeltas:
    """The whole that deltas join to: a message's ``content`` and ``tool_calls``."""

    _content: list[str] = field(default_factory=list)
    _calls: list[tuple[CallStart, list[str]]] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            match delta:
                case Content(text):
                    self._content.append(text)
                case CallStart():
                    self._calls.append((delta, []))
                case Arguments(index, text):
                    self._calls[index][1].append(text)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """As a message has them; empty without calls."""
        return [
            {
                "id": start.id,
                "type": "function",
                "function": {"name": start.name, "arguments": "".join(arguments)},
            }
            for start, arguments in self._calls
        ]
