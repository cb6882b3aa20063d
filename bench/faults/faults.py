"""Which faults are armed, and what happens to whoever passes the place of one."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

Point = Literal[
    "draft", "verify", "sample", "grammar", "allocate", "commit", "tokenize", "detokenize", "template", "compile"
]
Action = Literal["raise", "hang", "seize", "exit"]
POINTS: tuple[Point, ...] = get_args(Point)

# What stands in an injected exception's message. It must reach no client.
SECRET = "/srv/secret/weights.bin at 0xdeadbeef"


class InjectedFault(RuntimeError):
    """Raised on purpose."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, where, to whom and how often.

    - ``raise``: an InjectedFault
    - ``hang``: the thread waits until ``release``, or for ``seconds``
    - ``seize``: the same without letting go of the interpreter, so that no other thread runs; for an hour at most
    - ``exit``: the process ends without a word

    ``match`` picks the victim; None takes whoever comes. What it is compared with:

    ==================================  =============================================================
    draft, sample, grammar, detokenize  the seed of the choice (the request's, if n is 1)
    verify                              a token id among the rows of the forward
    allocate, commit                    the cache salt (the one of the table: other parts of it may be in front)
    tokenize                            a text in the prompt
    template, compile                   a text in what the child process is to work on
    ==================================  =============================================================
    """

    point: Point
    action: Action = "raise"
    match: int | str | None = None
    times: int | None = None  # so often; None: until it is cleared
    after: int = 0  # so many that match are let through before
    seconds: float | None = None  # of a hang; None: until it is released

    def __post_init__(self) -> None:
        if self.times is not None and self.times < 1:
            raise ValueError(f"times must be at least 1, or null; it is {self.times}")
        if self.after < 0:
            raise ValueError(f"after must not be negative; it is {self.after}")
        if self.seconds is not None and not 0 < self.seconds <= 3600:
            raise ValueError(f"seconds must be above 0 and at most 3600; it is {self.seconds}")


@dataclass(slots=True)
class Armed:
    """A fault and what became of it."""

    number: int
    fault: Fault
    passed: int = 0  # times that somebody who matches came by
    fired: int = 0
    hanging: int = 0  # threads that wait now
    released: threading.Event = field(default_factory=threading.Event)


class Faults:
    """The armed faults. Thread-safe: parts of the server ask from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._armed: tuple[Armed, ...] = ()

    def arm(self, fault: Fault) -> int:
        """Returns its number."""
        with self._lock:
            armed = Armed(next(self._numbers), fault)
            self._armed = (*self._armed, armed)
        return armed.number

    def clear(self) -> None:
        """Disarm all and let go whoever hangs."""
        with self._lock:
            cleared, self._armed = self._armed, ()
        for armed in cleared:
            armed.released.set()

    @property
    def armed(self) -> tuple[Armed, ...]:
        """To look at, not to change."""
        return self._armed

    @property
    def anything(self) -> bool:
        return bool(self._armed)

    def take(self, point: Point, marks: Collection[int | str] = ()) -> Armed | None:
        """The fault that strikes who comes by ``point`` with ``marks`` now; it counts as fired. None: go on."""
        if not self._armed:
            return None
        with self._lock:
            for armed in self._armed:
                fault = armed.fault
                if fault.point != point or (fault.match is not None and fault.match not in marks):
                    continue
                armed.passed += 1
                if armed.passed > fault.after and (fault.times is None or armed.fired < fault.times):
                    armed.fired += 1
                    return armed
        return None

    def pass_by(self, point: Point, marks: Collection[int | str] = ()) -> None:
        """Go on, or suffer the fault that is armed for this. Raises InjectedFault."""
        armed = self.take(point, marks)
        if armed is None:
            return
        fault = armed.fault
        if fault.action == "raise":
            raise InjectedFault(f"on purpose in {point}: {SECRET}")
        if fault.action == "exit":
            os._exit(99)
        if fault.action == "seize":
            # PyDLL keeps the interpreter's lock during the call.
            ctypes.PyDLL(None).usleep(int((fault.seconds or 3600) * 1_000_000))
            return
        with self._lock:
            armed.hanging += 1
        armed.released.wait(fault.seconds)
        with self._lock:
            armed.hanging -= 1
