"""A server whose parts fail on command, and what tests of faults share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.faults.faults import SECRET, Armed, Fault, Faults
from bench.faults.parts import faulty_parts
from server.service import Service
from tests.server.builders import MODEL_NAME, build_service, running

# A token id that nothing draws by itself: it falls on forwards that are fed it, and makes them raise.
POISON = 2


@dataclass(frozen=True)
class Failing:
    """A running server and its faults."""

    base: str
    service: Service
    faults: Faults

    def arm(self, fault: Fault) -> Armed:
        number = self.faults.arm(fault)
        return next(armed for armed in self.faults.armed if armed.number == number)


@contextlib.contextmanager
def failing_server(model: Path, home: Path, send_buffer: int | None = None, **settings: Any) -> Iterator[Failing]:
    faults = Faults()
    service = build_service(model, home, parts=faulty_parts(faults), **settings)
    with running(service, send_buffer) as base:
        try:
            yield Failing(base, service, faults)
        finally:
            faults.clear()  # or the model thread, and with it this process, would never end


def request(**fields: Any) -> dict[str, Any]:
    """A body whose answer can be compared: ids and seed are told."""
    body = {"model": MODEL_NAME, "max_tokens": 16, "seed": 1, "return_token_ids": True, "logit_bias": {POISON: -100}}
    return {**body, **fields}


@dataclass(frozen=True)
class Answer:
    """What came, streamed or not: per choice the text, ids and finish reason; or the error."""

    status: int
    choices: tuple[tuple[str, tuple[int, ...], str | None], ...] = ()
    error: dict[str, Any] | None = None
    ended: bool = True  # a stream's last event was [DONE]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if not body.get("stream"):
        response = await client.post(path, json=body)
        found = response.json()
        assert SECRET not in response.text
        if response.status_code != 200:
            return Answer(response.status_code, error=found["error"])
        return Answer(200, tuple(_choice([choice]) for choice in found["choices"]))
    async with client.stream("POST", path, json=body) as response:
        raw = (await response.aread()).decode()
    assert SECRET not in raw
    if response.status_code != 200:
        return Answer(response.status_code, error=json.loads(raw)["error"])
    events = [event[6:] for event in raw.split("\n\n") if event]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    error = next((chunk["error"] for chunk in chunks if "error" in chunk), None)
    pieces: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for piece in chunk.get("choices", ()):
            pieces.setdefault(piece["index"], []).append(piece)
    return Answer(200, tuple(_choice(pieces[index]) for index in sorted(pieces)), error, events[-1] == "[DONE]")


def _choice(pieces: list[dict[str, Any]]) -> tuple[str, tuple[int, ...], str | None]:
    def text(piece: dict[str, Any]) -> str:
        if "text" in piece:
            return str(piece["text"])
        return str((piece.get("message") or piece.get("delta") or {}).get("content") or "")

    ids = tuple(token_id for piece in pieces for token_id in piece.get("token_ids") or ())
    return "".join(map(text, pieces)), ids, pieces[-1]["finish_reason"]
