"""What the workers of test_worker.py call."""

from __future__ import annotations

import os
import re
import sys
import time


def add(a: int, b: int) -> int:
    return a + b


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def hold_the_interpreter() -> None:
    re.match("(a|a)*$", "a" * 64 + "b")  # for years, and in C: no other thread of the child runs


def refuse(message: str) -> None:
    raise ValueError(message)


def fail() -> None:
    raise KeyError("of no concern to a client")


def die() -> None:
    os._exit(3)


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def modules() -> list[str]:
    return list(sys.modules)


def environment() -> dict[str, str]:
    return dict(os.environ)
