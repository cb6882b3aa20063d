"""Records as files, and what a replay says of them."""

from __future__ import annotations

import json
from pathlib import Path

from bench.replay.record import read_record
from bench.replay.replay import replay
from server.service import Service


def write(path: Path, record: object) -> Path:
    file = path / "record.json"
    file.write_text(json.dumps(record), "utf-8")
    return file


def said(service: Service, file: Path, *, plain: bool = False) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return replay(service, read_record(file), plain=plain, say=lines.append), lines
