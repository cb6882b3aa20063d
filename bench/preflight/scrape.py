"""A live server's /v1/server_info and /metrics, over a window: what happened between two scrapes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from server.commands import CommandError

PREFIX = "truedraft_"
GAUGE_SECONDS = 0.5  # between two looks at the gauges of a window
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples of one GET /metrics by name without the prefix; those of several models or engines are summed."""

    samples: Mapping[str, Mapping[Labels, float]]

    @classmethod
    def parse(cls, text: str) -> Scrape:
        """From Prometheus' text format; lines of other prefixes and lines that are none are left out."""
        samples: dict[str, dict[Labels, float]] = {}
        for line in text.splitlines():
            found = _SAMPLE.fullmatch(line.strip())
            if found is None or not found["name"].startswith(PREFIX) or found["name"].endswith("_created"):
                continue
            try:
                value = float(found["value"])
            except ValueError:
                continue
            labels = tuple(
                sorted(
                    pair for pair in _LABEL.findall(found["labels"] or "") if pair[0] not in ("model_name", "engine")
                )
            )
            family = samples.setdefault(found["name"].removeprefix(PREFIX), {})
            family[labels] = family.get(labels, 0.0) + value
        return cls(samples)

    def value(self, name: str, **labels: str) -> float | None:
        """The sum of the samples that have ``labels``; None if there is none."""
        found = [v for ls, v in self.samples.get(name, {}).items() if set(labels.items()) <= set(ls)]
        return sum(found) if found else None


@dataclass(frozen=True, slots=True)
class Window:
    """What a server did between two scrapes. ``since_start``: nothing happened between them, so all since its start."""

    info: Mapping[str, Any]
    before: Scrape
    after: Scrape
    gauges: tuple[Scrape, ...]
    seconds: float
    since_start: bool

    def delta(self, name: str, **labels: str) -> float | None:
        """How much a counter grew; None if the server does not have it."""
        after = self.after.value(name, **labels)
        if after is None:
            return None
        return after if self.since_start else after - (self.before.value(name, **labels) or 0.0)

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
        bounds: dict[float, float] = {}
        for labels in self.after.samples.get(f"{histogram}_bucket", {}):
            le = dict(labels).get("le")
            if le is not None:
                bounds[float(le)] = self.delta(f"{histogram}_bucket", le=le) or 0.0
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


def watch(url: str, seconds: float, *, timeout: float = 10.0) -> Window:
    """Scrape ``url`` now and ``seconds`` later, with looks at the gauges in between. Raises CommandError, one line."""
    with httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client:
        info = read_info(client, url)
        started = time.monotonic()
        scrapes = [read_metrics(client, url)]
        while (left := started + seconds - time.monotonic()) > 0:
            time.sleep(min(left, GAUGE_SECONDS))
            scrapes.append(read_metrics(client, url))
        if len(scrapes) == 1:
            scrapes.append(read_metrics(client, url))
        return window(info, scrapes, time.monotonic() - started, url)


def window(info: Mapping[str, Any], scrapes: Iterable[Scrape], seconds: float, url: str) -> Window:
    """Of scrapes in order, at least two. Raises CommandError if the server restarted between them."""
    listed = tuple(scrapes)
    first, last = listed[0], listed[-1]
    for name in ("generation_tokens_total", "iteration_tokens_total_count"):
        if (first.value(name) or 0.0) > (last.value(name) or 0.0):
            raise CommandError(f"--url {url}: the server restarted between two scrapes")
    steps = (last.value("iteration_tokens_total_count") or 0) - (first.value("iteration_tokens_total_count") or 0)
    return Window(info, first, last, listed, seconds, since_start=steps <= 0)


def read_info(client: httpx.Client, url: str) -> Mapping[str, Any]:
    """GET /v1/server_info as an object."""
    response = _get(client, url, "/v1/server_info")
    try:
        found = json.loads(response)
    except json.JSONDecodeError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("exactness"), dict):
        raise CommandError(f"--url {url}: /v1/server_info is not that of a Truedraft server")
    return found


def read_metrics(client: httpx.Client, url: str) -> Scrape:
    """GET /metrics."""
    scrape = Scrape.parse(_get(client, url, "/metrics"))
    if not scrape.samples:
        raise CommandError(f"--url {url}: /metrics has no metric named {PREFIX}...")
    return scrape


def _get(client: httpx.Client, url: str, path: str) -> str:
    try:
        response = client.get(path)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise CommandError(f"--url {url}: {path} cannot be read: {str(error) or type(error).__name__}") from error
    if response.status_code != 200:
        raise CommandError(f"--url {url}: {path} answers {response.status_code}")
    return response.text
