"""What is shown of a server, from its state and the events of its feed: numbers alone, no terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from statistics import quantiles
from typing import Any

from specdec import plan

STAGES = (*plan.STAGES, "other")
MAX_STEPS = 128  # of the means
STEPS_BEFORE = 64  # that are asked for at the start, so that there is something to see
MAX_GAPS = 1024  # of the ITL
MAX_REQUESTS = 50
STATE_ORDER_SECONDS = 2.0  # by which one state may overtake another

_FULLEST_FIRST = "supc."  # the letters of a block map


class Board:
    """Takes whatever comes, in order; a state that comes again replaces what it says."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.seq = 0
        self.running = 0
        self.waiting = 0
        self.dropped = 0  # steps between those that were seen: lost by the feed, or while it was closed
        self.block_map = ""
        self.requests: deque[dict[str, Any]] = deque(maxlen=MAX_REQUESTS)  # newest first
        self.steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS)
        self.gaps: deque[float] = deque(maxlen=MAX_GAPS)  # between the steps of a choice that brought it tokens
        self._last: dict[int, float] = {}  # when each choice got tokens last
        self._newest = 0  # the last step that was taken: a feed that is opened again begins before it

    def take_state(self, state: dict[str, Any]) -> None:
        if self.state is None or _is_another_start(state, self.state):
            self.seq = state["seq"]
            self.requests = deque(state["recent"], maxlen=MAX_REQUESTS)
            self.steps.clear()
            self.gaps.clear()
            self._last.clear()
            self._newest = 0
        self.state = state
        self.running, self.waiting = state["now"]["running"], state["now"]["waiting"]

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        """An event of the feed; unknown ones are of a later version."""
        if name == "steps":
            self.seq = data["seq"]
            for step in data["steps"]:
                self._take_step(step)
        elif name == "requests":
            for request in data["requests"]:
                if all(known["key"] != request["key"] for known in self.requests):  # the state had it
                    self.requests.appendleft(request)
                self._last.pop(request["key"], None)
        elif name == "blocks":
            self.block_map = expanded(data["map"]) if data["rle"] else data["map"]

    def _take_step(self, step: dict[str, Any]) -> None:
        if step["n"] <= self._newest:
            return
        missed = step["n"] - self._newest - 1 if self._newest else 0
        if missed:
            self.dropped += missed
            self._last.clear()  # a gap over lost steps would be none
        self._newest = step["n"]
        self.steps.append(step)
        if self.state is not None and step["n"] > self.state["seq"]:
            self.running, self.waiting = step["running"], step["waiting"]
        for key, emitted, *_ in step["seqs"]:
            if emitted:
                if key in self._last:
                    self.gaps.append(step["t"] - self._last[key])
                self._last[key] = step["t"]

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Mean of each stage over the newest steps; empty without steps."""
        if not self.steps:
            return {}
        return {name: sum(step["s"].get(name, 0.0) for step in self.steps) / len(self.steps) for name in STAGES}

    @property
    def itl(self) -> tuple[float, float] | None:
        """Median and 95th percentile, in seconds; None with fewer than two gaps."""
        if len(self.gaps) < 2:
            return None
        cuts = quantiles(self.gaps, n=20, method="inclusive")
        return cuts[9], cuts[18]


def _is_another_start(state: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Of two states that may have come in the wrong order."""
    return bool(state["server"]["uptime_s"] + STATE_ORDER_SECONDS < before["server"]["uptime_s"])


def expanded(runs: str) -> str:
    """``"3u2."`` as ``"uuu.."``."""
    found, count = [], ""
    for letter in runs:
        if letter.isdigit():
            count += letter
        else:
            found.append(letter * int(count or "1"))
            count = ""
    return "".join(found)


def shrunk(block_map: str, size: int) -> str:
    """At most ``size`` letters, each the one that most blocks of its piece have; on a tie the fuller one."""
    if len(block_map) <= size:
        return block_map
    ends = [i * len(block_map) // size for i in range(size + 1)]
    return "".join(_most(block_map[start:end]) for start, end in pairwise(ends))


def _most(piece: str) -> str:
    return max(_FULLEST_FIRST, key=piece.count)  # of several, max takes the first


def runs(letters: Sequence[str]) -> list[tuple[str, int]]:
    """Each run of equal letters with its length."""
    return [(letter, sum(1 for _ in run)) for letter, run in groupby(letters)]
