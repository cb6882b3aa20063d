"""Closed and open loops: who sends when, and what each request saw."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.serving.options import Load
from bench.serving.trace import Trace
from bench.serving.wire import Client


@dataclass(frozen=True, slots=True)
class Request:
    """``key`` names what decides the output: equal keys must give equal outputs."""

    prompt: str
    key: tuple[str, str, int]
    body: Mapping[str, Any]


@dataclass(slots=True)
class LoadResult:
    """Traces in the order of the requests; those that were never sent, after an interrupt, are missing."""

    traces: list[Trace] = field(default_factory=list)
    duration: float = 0.0  # from the first planned arrival to the last end


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` requests of a Poisson process are due; the first at 0.

    Of the seed alone, so that every mode meets the same schedule.
    """
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


async def run_load(client: Client, path: str, requests: Sequence[Request], load: Load, seed: int) -> LoadResult:
    """Send all requests as the load says and wait for every answer. Never raises for what one of them met."""
    gc.disable()  # a collection in the middle would be read as the server's pause
    try:
        if load.seats is not None:
            return await _closed(client, path, requests, load.seats)
        assert load.rate is not None
        return await _open(client, path, requests, arrivals(load.rate, len(requests), seed))
    finally:
        gc.enable()


async def _closed(client: Client, path: str, requests: Sequence[Request], seats: int) -> LoadResult:
    """The next request takes the seat of one that ended."""
    traces: list[Trace | None] = [None] * len(requests)
    waiting = iter(range(len(requests)))
    started = time.perf_counter()

    async def sit() -> None:
        for i in waiting:
            trace = traces[i] = Trace(requests[i].prompt, planned=time.perf_counter())
            await client.stream(path, requests[i].body, trace)

    await asyncio.gather(*(sit() for _ in range(min(seats, len(requests)))))
    return _result(traces, started)


async def _open(client: Client, path: str, requests: Sequence[Request], times: Sequence[float]) -> LoadResult:
    """Nobody waits for an answer; latencies count from the planned arrival, however late a request was sent."""
    started = time.perf_counter() + 0.05
    traces = [Trace(request.prompt, planned=started + at) for request, at in zip(requests, times, strict=True)]

    async def send(i: int) -> None:
        await asyncio.sleep(max(0.0, traces[i].planned - time.perf_counter()))
        await client.stream(path, requests[i].body, traces[i])

    await asyncio.gather(*(send(i) for i in range(len(requests))))
    return _result(traces, started)


def _result(traces: Sequence[Trace | None], started: float) -> LoadResult:
    known = [trace for trace in traces if trace is not None]
    return LoadResult(known, max((trace.ended for trace in known), default=started) - started)
