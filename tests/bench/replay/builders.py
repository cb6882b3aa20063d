"""Records as files, and what a replay says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.replay.compare import compare, compare_usage, not_compared
from bench.replay.record import SavedPair, read_record
from bench.replay.replay import replay
from server.service import Service


def write(path: Path, record: object) -> Path:
    file = path / "record.json"
    file.write_text(json.dumps(record), "utf-8")
    return file


def said(service: Service, file: Path, *, plain: bool = False) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return replay(service, read_record(file), plain=plain, say=lines.append), lines


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within ``value`` that is no list and no object."""
    if isinstance(value, dict | list) and value:
        for step, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, step))
    else:
        yield path


def edited(pair: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """A copy of ``pair`` in which the value at ``path`` is another."""
    pair = json.loads(json.dumps(pair))
    inner = pair
    for step in path[:-1]:
        inner = inner[step]
    old = inner[path[-1]]
    inner[path[-1]] = old + "x" if isinstance(old, str) else old + 1 if isinstance(old, int | float) else "x"
    return pair


def judged(clean: object, record: object) -> tuple[bool, list[str]]:
    """What is said of ``record`` if ``clean`` comes again, as it does."""
    assert isinstance(clean, SavedPair)
    assert isinstance(record, SavedPair)
    then, now = record.answer, clean.answer
    told = [compare(index, one, now.outputs.get(index), record.asked) for index, one in then.outputs.items()]
    told += [compare_usage(then.usage, now.usage or {})] if then.usage else []
    return all(one.same for one in told), [*(one.line for one in told), not_compared(record) or ""]
