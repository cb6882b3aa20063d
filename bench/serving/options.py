"""What a run of ``truedraft bench`` is asked to do, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.commands import CommandError

OFF, AUTO, SERVER = "off", "auto", "server"
SLO_NAMES = ("ttft", "tpot", "itl", "e2el")
_FIXED = re.compile(r"k(\d{1,4})(?::([a-z][\w-]{0,31}))?")


@dataclass(frozen=True, slots=True)
class Mode:
    """How requests ask for speculation. ``k`` None: they say nothing, so the server decides."""

    name: str
    k: int | None = None
    drafter: str | None = None

    @property
    def fields(self) -> dict[str, object]:
        """Of the request's body."""
        if self.k is None:
            return {}
        named = {} if self.drafter is None else {"drafter": self.drafter}
        return {"speculation": {"num_speculative_tokens": self.k, **named}}


@dataclass(frozen=True, slots=True)
class Load:
    """Closed: ``seats`` requests at a time. Open: ``rate`` requests a second, whether or not answers come."""

    seats: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.seats} at a time" if self.seats is not None else f"{self.rate:g}/s"

    @property
    def short(self) -> str:
        return str(self.seats) if self.seats is not None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class Slo:
    """A request is good if its ``name`` is at most ``milliseconds``; of ITL its longest gap counts."""

    name: str
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.name}:{self.milliseconds:g}"


@dataclass(frozen=True, slots=True)
class Size:
    """Of each run. ``requests`` None: twice as many as seats, at least 8; in an open loop 20 seconds' worth."""

    rounds: int
    tokens: int
    requests: int | None
    temperature: float
    seed: int
    ignore_eos: bool
    chat: bool  # /v1/chat/completions instead of /v1/completions
    timeout: float  # seconds without a byte

    def requests_of(self, load: Load) -> int:
        if self.requests is not None:
            return self.requests
        return max(8, 2 * load.seats) if load.seats is not None else max(16, math.ceil(20 * (load.rate or 0)))


@dataclass(frozen=True, slots=True)
class NamedTarget:
    """A server that runs already."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class Options:
    workloads: tuple[str, ...]
    prompts: Path | None
    loads: tuple[Load, ...]
    modes: tuple[Mode, ...]
    slos: tuple[Slo, ...]
    size: Size
    targets: tuple[NamedTarget, ...]
    served_model: str | None
    api_key_env: str
    block_sizes: tuple[int, ...]
    serve_flags: tuple[str, ...]
    nice: int
    folder: Path
    command: str


def parse_mode(text: str) -> Mode:
    """``off``, ``auto``, ``k4`` or ``k4:ngram``. Raises CommandError."""
    if text == OFF:
        return Mode(OFF, 0)
    if text == AUTO:
        return Mode(AUTO)
    found = _FIXED.fullmatch(text)
    if found is None or int(found[1]) < 1:
        raise CommandError(f"--mode must be off, auto, k4 or k4:ngram (any number, any drafter), got {text!r}")
    return Mode(text, int(found[1]), found[2])


def parse_slo(text: str) -> Slo:
    """``ttft:500``: a name and milliseconds. Raises CommandError."""
    name, separator, value = text.partition(":")
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if not separator or name not in SLO_NAMES or not (math.isfinite(milliseconds) and milliseconds > 0):
        raise CommandError(f"--slo must be one of {', '.join(SLO_NAMES)} and milliseconds, as ttft:500, got {text!r}")
    return Slo(name, milliseconds)


def parse_target(text: str) -> NamedTarget:
    """``URL`` or ``NAME=URL``. Raises CommandError."""
    name, separator, url = text.partition("=")
    if not separator or "://" in name:
        name, url = "", text
    if re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", url) is None:
        raise CommandError(f"--target must be a URL that begins with http:// or https://, or NAME=URL, got {text!r}")
    url = url.rstrip("/").removesuffix("/v1")
    return NamedTarget(name or url.partition("://")[2], url)


def parse_sizes(text: str) -> tuple[int, ...]:
    """``1,16,64``. Raises CommandError."""
    try:
        sizes = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise CommandError(f"--block-sizes must be positive numbers separated by commas, got {text!r}")
    return sizes


def unique(values: Sequence[str], flag: str) -> tuple[str, ...]:
    """Raises CommandError if one is named twice."""
    twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
    if twice is not None:
        raise CommandError(f"{flag} names {twice} twice")
    return tuple(values)
