"""The log of the server under test (``--log-format json``): what it says of every request, and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

INJECTED = "InjectedFault"  # stands in every error that was asked for
_ACCESS = "truedraft.access"


@dataclass(slots=True)
class ServerLog:
    tokens: dict[str, int] = field(default_factory=dict)  # generated for each request that was taken in, by its id
    twice: list[str] = field(default_factory=list)  # ids of requests that are told twice
    statuses: dict[str, int] = field(default_factory=dict)  # of every request
    errors: list[str] = field(default_factory=list)  # that nobody asked for, a line each
    num_injected: int = 0  # errors that were asked for


def read_log(lines: Iterable[str]) -> ServerLog:
    """Lines that are no log records (the start-up's) are left out."""
    log = ServerLog()
    for line in lines:
        if not line.startswith("{"):
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        if entry.get("logger") == _ACCESS:
            _take_access(log, entry)
        elif entry.get("level") in ("error", "critical"):
            if INJECTED in line:
                log.num_injected += 1
            else:
                last = (entry.get("exception") or "").strip().rpartition("\n")[2]
                log.errors.append(f"{entry.get('logger')}: {entry.get('message')} {last}".strip())
    return log


def _take_access(log: ServerLog, entry: dict[str, Any]) -> None:
    request_id = entry["request_id"]
    if request_id in log.statuses:
        log.twice.append(request_id)
    log.statuses[request_id] = entry["status"]
    if "completion_tokens" in entry:
        log.tokens[request_id] = log.tokens.get(request_id, 0) + entry["completion_tokens"]
