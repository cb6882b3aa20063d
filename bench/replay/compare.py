"""Whether an answer came again: everything that a request, its seed and the fingerprint decide, nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bench.foreign import shown
from bench.replay.joining import Output
from bench.replay.record import FIELDS, USAGE, AuditRecord, SavedPair


@dataclass(frozen=True, slots=True)
class Comparison:
    same: bool
    line: str  # for people


def compare(index: int, then: Output, now: Output | None, asked: Collection[str] = ()) -> Comparison:
    """One choice. What ``then`` does not hold is not compared, unless it was ``asked`` for."""
    if now is None:
        return Comparison(False, f"choice {shown(index)}: not there any more")
    same: list[str] = []
    for name in FIELDS:
        if not _holds(then, name):
            if name in asked:
                return Comparison(False, _but(index, same, f"the record lacks {name}, which its request asks for"))
            continue
        what = _difference(name, then[name], now.get(name))
        if what is not None:
            return Comparison(False, _but(index, same, what))
        same.append(f"{name} ({len(then[name])})" if name == "token_ids" else name)
    return Comparison(True, f"choice {shown(index)}: the same {', '.join(same)}")


def compare_usage(then: Mapping[str, Any], now: Mapping[str, Any]) -> Comparison:
    for name in then:
        what = difference(then[name], now.get(name), name)
        if what is not None:
            return Comparison(False, f"usage: {what}")
    return Comparison(True, f"usage: the same {', '.join(then)}")


def not_compared(record: SavedPair | AuditRecord) -> str | None:
    """A line about what the record does not hold; None if it holds everything."""
    pair = isinstance(record, SavedPair)
    outputs = list(record.answer.outputs.values()) if isinstance(record, SavedPair) else [record.output]
    foreign = "text" if isinstance(record, SavedPair) and record.is_chat else "message"
    lacks = [name for name in FIELDS if name != foreign and not all(_holds(output, name) for output in outputs)]
    usage = record.answer.usage if isinstance(record, SavedPair) else None
    lacks += [f"usage.{name}" for name in USAGE if pair and name not in (usage or {})]
    return f"not in the record, so not compared: {', '.join(lacks)}" if lacks else None


def _holds(output: Output, name: str) -> bool:
    # null is what an answer says that was not asked; of an end it is a value.
    return name in output and (output[name] is not None or name in ("finish_reason", "stop_reason"))


def _but(index: int, same: list[str], what: str) -> str:
    return f"choice {shown(index)}: {'the ids are the same, but ' if same and 'token_ids' in same[0] else ''}{what}"


def _difference(name: str, then: Any, now: Any) -> str | None:
    if name == "token_ids" and isinstance(now, list):
        for position, (old, new) in enumerate(zip(then, now, strict=False)):
            if difference(old, new, "") is not None:
                return f"output token {position} is {shown(new)}, and was {shown(old)}"
        same = len(then) == len(now)
        return None if same else f"it has {len(now)} output tokens, and had {len(then)}"
    if name == "text" and then != now:
        at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
        return f"the text differs from character {at} on"
    if name == "finish_reason" and then != now:
        return f"it ended by {shown(now)}, and did by {shown(then)}"
    return difference(then, now, name)


def difference(then: Any, now: Any, path: str) -> str | None:
    """The first place where two JSON values differ, for people; None if they are equal."""
    if isinstance(then, dict) and isinstance(now, dict):
        for name in [*then, *(name for name in now if name not in then)]:
            place = f"{path}.{shown(name, 40)}"
            if name not in now:
                return f"{place} is not there any more"
            if name not in then:
                return f"{place} is {shown(now[name], 60)}, and was not there"
            what = difference(then[name], now[name], place)
            if what is not None:
                return what
        return None
    if isinstance(then, list) and isinstance(now, list):
        for position, (old, new) in enumerate(zip(then, now, strict=False)):
            what = difference(old, new, f"{path}[{position}]")
            if what is not None:
                return what
        return None if len(then) == len(now) else f"{path} has {len(now)} entries, and had {len(then)}"
    if then == now and isinstance(then, bool) == isinstance(now, bool):
        return None
    return f"{path} is {shown(now, 60)}, and was {shown(then, 60)}"
