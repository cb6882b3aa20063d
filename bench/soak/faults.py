"""Faults that the soak asks of the server while it runs (bench.faults): such as a server has to survive."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.faults.faults import Action, Point
from bench.soak.requests import Planned
from bench.soak.wire import exchange

MODULE = "bench.faults"  # python -m ... serve
HANG_SECONDS = 0.3
_PATH = "/faults"
_SECONDS = 30.0  # for one call

# Once, for whoever comes by. A hang ends by itself here.
_PASSING: tuple[tuple[Point, Action], ...] = (
    ("draft", "raise"),
    ("verify", "raise"),
    ("sample", "raise"),
    ("tokenize", "raise"),
    ("template", "raise"),
    ("compile", "raise"),
    ("template", "exit"),
    ("compile", "exit"),
    ("verify", "hang"),
    ("sample", "hang"),
    ("tokenize", "hang"),
    ("detokenize", "hang"),
)
# What costs nobody anything but time: without a draft a step is a step, and a step that raised is run again.
_HARMLESS = ("draft", "verify")
# Every time, for one request alone, which has to fail by itself; but one without drafts is answered.
VICTIMS: tuple[Point, ...] = ("draft", "sample", "grammar", "detokenize")
SPARED: Point = "draft"
NAMES = (*(f"{point} {action}" for point, action in _PASSING), *(f"{point} victim" for point in VICTIMS))


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that happened. ``cost``: the most requests that it may fail, its victim apart."""

    name: str
    cost: int


class SoakFaults:
    """Arms one fault after the other, in turn and mixed, and collects those that happened."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self._address = address
        self._rng = random.Random(seed)
        self._left: list[tuple[Point, Action | None]] = []

    async def arm(self, victim: Callable[[Point], Planned]) -> Planned | None:
        """The next fault. If it is for one request, that is returned, still to be sent."""
        if not self._left:
            self._left = [*_PASSING, *((point, None) for point in VICTIMS)]
            self._rng.shuffle(self._left)
        point, action = self._left.pop()
        if action is None:
            planned = victim(point)
            await self._call("POST", {"point": point, "action": "raise", "match": planned.body["seed"]})
            return planned
        fault: dict[str, Any] = {"point": point, "action": action, "times": 1, "after": self._rng.choice((0, 0, 3, 20))}
        if action == "hang":
            fault["seconds"] = HANG_SECONDS
        elif point in ("template", "compile"):
            fault["after"] = 0  # they come less often
        await self._call("POST", fault)
        return None

    async def collect(self) -> list[Fired]:
        """Disarm all; those that happened since the last call."""
        return fired((await self._call("DELETE")).get("faults", []))

    async def _call(self, method: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The answer; empty from a server that does not answer, which is no reason to end the soak here."""
        raw = b"" if body is None else json.dumps(body).encode()
        reply = await exchange(self._address, method, _PATH, raw, patience=_SECONDS)
        if reply.status is None:
            return {}
        if reply.status != 200:
            raise RuntimeError(f"{method} {_PATH} was answered {reply.status}: {reply.body!r}")
        answer: dict[str, Any] = json.loads(reply.body)
        return answer


def fired(armed: Sequence[Mapping[str, Any]]) -> list[Fired]:
    """From what the endpoint shows."""
    found = []
    for one in armed:
        point, action = one["fault"]["point"], one["fault"]["action"]
        if not one["fired"]:
            continue
        if one["fault"]["match"] is not None:
            found.append(Fired(f"{point} victim", 0))
        else:
            found.append(Fired(f"{point} {action}", 0 if action == "hang" or point in _HARMLESS else 1))
    return found
