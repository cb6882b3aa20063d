"""A live server's /metrics over a window: what happened between two scrapes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.foreign import ForeignError, shown
from bench.preflight.info import ServerInfo, read_server_info
from bench.preflight.reader import Reader
from server.commands import CommandError

PREFIX = "truedraft_"
GAUGE_SECONDS = 0.5  # between two looks at the gauges of a window
MAX_SAMPLES = 20_000  # of one scrape; a server of ours has some hundreds
MAX_VALUE = float(2**63)
GAUGES = frozenset({"num_requests_running", "num_requests_waiting", "kv_fragmentation_ratio"})  # looked at in between
# Possessive, so that no line takes more than linear time.
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*+)(?:\{(?P<labels>.*)\})?\s++(?P<value>\S++)(?:\s++-?\d++)?")
_LABEL = re.compile(r'(?<!\w)(\w++)="((?:[^"\\]|\\.)*+)"')

_COUNTS = ("_total", "_count", "_bucket")

Labels = tuple[tuple[str, str], ...]
_IGNORED_LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples of one GET /metrics by name without the prefix; those of several models or engines are summed.

    No value is negative, NaN or above MAX_VALUE, what counts is whole, every ``le`` is a number: a name of which this
    is not so stands in ``impossible``, with the reason.
    """

    samples: Mapping[str, Mapping[Labels, float]]
    impossible: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, prefix: str = PREFIX) -> Scrape:
        """From Prometheus' text format; lines of other prefixes and lines that are none are left out.

        Raises ForeignError if there are too many.
        """
        samples: dict[str, dict[Labels, float]] = {}
        impossible: dict[str, str] = {}
        count = 0
        for line in text.splitlines():
            line = line.strip()
            if not line.startswith(prefix) or (found := _SAMPLE.fullmatch(line)) is None:
                continue
            name = found["name"].removeprefix(prefix)
            if name.endswith("_created"):
                continue
            count += 1
            if count > MAX_SAMPLES:
                raise ForeignError(f"has more than {MAX_SAMPLES:,} samples")
            pairs = _LABEL.findall(found["labels"] or "")
            labels = tuple(sorted(pair for pair in pairs if pair[0] not in _IGNORED_LABELS))
            family = samples.setdefault(name, {})
            fault = _fault(name, found["value"], dict(labels).get("le"))
            if fault is not None:
                impossible[name] = fault
            else:
                family[labels] = family.get(labels, 0.0) + float(found["value"])
        return cls(samples, impossible)

    def buckets(self, name: str) -> dict[float, float]:
        """Counts by upper bound; empty if there is none, or an impossible one."""
        counts: dict[float, float] = {}
        for labels, count in self.samples.get(name, {}).items() if name not in self.impossible else ():
            le = dict(labels).get("le")
            if le is not None:
                counts[float(le)] = counts.get(float(le), 0.0) + count
        return counts

    def only(self, names: Collection[str]) -> Scrape:
        """Without any other name."""
        return Scrape(
            {name: family for name, family in self.samples.items() if name in names},
            {name: fault for name, fault in self.impossible.items() if name in names},
        )

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have ``labels``; None if there is none, or an impossible one."""
        if name in self.impossible:
            return None
        found = [v for ls, v in self.samples.get(name, {}).items() if set(labels.items()) <= set(ls)]
        return sum(found) if found else None


def _fault(name: str, text: str, le: str | None) -> str | None:
    """Why no server of ours can report this sample; None if one can."""
    value = _number(text)
    if value is None or not 0 <= value <= MAX_VALUE or (name.endswith(_COUNTS) and value != int(value)):
        return f"{shown(name, 80)} is {shown(text, 40)}"
    bound = 0.0 if le is None else _number(le)
    if bound is None or (abs(bound) > MAX_VALUE and bound != math.inf):
        return f"a bucket of {shown(name, 80)} ends at {shown(le, 40)}"
    return None


def _number(text: str) -> float | None:
    """None for NaN, too."""
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


@dataclass(frozen=True, slots=True)
class Window:
    """What a server did between two scrapes. ``since_start``: nothing happened between them, so all since its start."""

    info: ServerInfo
    before: Scrape
    after: Scrape
    gauges: tuple[Scrape, ...]  # GAUGES at every look
    seconds: float
    since_start: bool

    def impossible(self, *names: str) -> str | None:
        """What of these samples no server of ours can report; None if it all can be."""
        for name in names:
            for scrape in (self.before, self.after, *(self.gauges if name in GAUGES else ())):
                if name in scrape.impossible:
                    return scrape.impossible[name]
            if name.endswith(_COUNTS) and (self.before.value(name) or 0.0) > (self.after.value(name) or 0.0):
                return f"{name} went down"
        return None

    def delta(self, name: str, **labels: str) -> float | None:
        """How much a counter grew; None if the server does not have it, or it went down."""
        after = self.after.value(name, **labels)
        if after is None:
            return None
        grown = after if self.since_start else after - (self.before.value(name, **labels) or 0.0)
        return grown if grown >= 0 else None

    def ratio(self, above: str, below: str) -> float | None:
        """Growth of one counter / growth of another; None if the latter did not grow."""
        a, b = self.delta(above), self.delta(below)
        return a / b if a is not None and b else None

    def mean(self, histogram: str, **labels: str) -> float | None:
        """The mean observation; None if there was none."""
        total, count = self.delta(f"{histogram}_sum", **labels), self.delta(f"{histogram}_count", **labels)
        return total / count if total is not None and count else None

    def quantile(self, histogram: str, q: float) -> float | None:
        """As Prometheus' histogram_quantile: linear within a bucket; None if nothing was observed."""
        bounds = self.after.buckets(f"{histogram}_bucket")
        if not self.since_start:
            before = self.before.buckets(f"{histogram}_bucket")
            bounds = {bound: count - before.get(bound, 0.0) for bound, count in bounds.items()}
        ordered = sorted(bounds.items())
        if not ordered or ordered[-1][1] <= 0:
            return None
        rank, left, below = q * ordered[-1][1], 0.0, 0.0
        for bound, count in ordered:
            if count >= rank:
                if bound == float("inf"):
                    return left
                return left + (bound - left) * (rank - below) / (count - below) if count > below else bound
            left, below = bound, count
        return left

    def busy_gauges(self, name: str) -> list[float]:
        """The gauge at every look during which something ran."""
        busy = [scrape for scrape in self.gauges if (scrape.value("num_requests_running") or 0) > 0]
        return [value for scrape in busy if (value := scrape.value(name)) is not None]


def watch(url: str, seconds: float) -> Window:
    """Scrape ``url`` now and ``seconds`` later, with looks at the gauges in between. Raises CommandError, one line."""
    reader = Reader(url)
    info = read_info(reader)
    started = time.monotonic()
    last = first = read_metrics(reader)
    looks = [first.only(GAUGES)]
    while (left := started + seconds - time.monotonic()) > 0 or len(looks) < 2:
        time.sleep(max(0.0, min(left, GAUGE_SECONDS)))
        last = read_metrics(reader)
        looks.append(last.only(GAUGES))
    return window(info, first, last, looks, time.monotonic() - started, url)


def window(info: ServerInfo, first: Scrape, last: Scrape, looks: Sequence[Scrape], seconds: float, url: str) -> Window:
    """``looks``: at the gauges, from ``first`` to ``last``. Raises CommandError if the server restarted in between."""
    for name in ("generation_tokens_total", "iteration_tokens_total_count"):
        if (first.value(name) or 0.0) > (last.value(name) or 0.0):
            raise CommandError(f"--url {url}: the server restarted between two scrapes")
    steps = (last.value("iteration_tokens_total_count") or 0) - (first.value("iteration_tokens_total_count") or 0)
    return Window(info, first, last, tuple(looks), seconds, since_start=steps <= 0)


def read_info(reader: Reader) -> ServerInfo:
    """GET /v1/server_info."""
    body = reader.get("/v1/server_info")
    try:
        return read_server_info(body)
    except ForeignError as error:
        raise reader.error(f"/v1/server_info {error}") from error


def read_metrics(reader: Reader) -> Scrape:
    """GET /metrics."""
    body = reader.get("/metrics")
    try:
        scrape = Scrape.parse(body.decode("utf-8", "replace"))
    except ForeignError as error:
        raise reader.error(f"/metrics {error}") from error
    if not scrape.samples:
        raise reader.error(f"/metrics has no metric named {PREFIX}...")
    return scrape
