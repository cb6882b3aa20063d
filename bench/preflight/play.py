"""Requests played at a server with speculation off and on in turn, and what its metrics say meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.client import RequestTrace, StreamError, closed_loop
from bench.foreign import shown
from bench.preflight.reader import Reader
from bench.preflight.scrape import GAUGE_SECONDS, GAUGES, Scrape, Window, read_info, read_metrics, window
from server.commands import CommandError

PASS_SECONDS = 3600.0  # all requests of a pass

Pairs = list[tuple[float, float]]  # a round's medians in seconds: without, with speculation


@dataclass(frozen=True, slots=True)
class Played:
    ttft: Pairs
    itl: Pairs  # between chunks
    tpot: Pairs  # a token
    compared: int
    different: int  # requests whose token ids differ between off and on
    concurrency: int
    window: Window  # from the first request to the last, both ways together


def play(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    *,
    concurrency: int,
    rounds: int,
    progress: Callable[[str], None] = lambda line: None,
) -> Played:
    """Send ``bodies`` (of /v1/completions) ``rounds`` times each way, at most ``concurrency`` at once.

    Every pass has a cache salt of its own, so no prefix-cache hit flatters a repetition; the order of off and on
    changes from round to round. Raises CommandError, one line, if the server cannot do it.
    """
    passes: dict[bool, list[list[RequestTrace]]] = {False: [], True: []}
    with _Watcher(url) as watcher:
        try:
            _send(url, _pass(bodies[:concurrency], "warm-up", True), concurrency)
            for number in range(rounds):
                for speculative in (False, True) if number % 2 == 0 else (True, False):
                    progress(f"requests, round {number + 1} of {rounds}, speculation {'on' if speculative else 'off'}")
                    salted = _pass(bodies, f"{number}-{speculative}-{time.time_ns()}", speculative)
                    passes[speculative].append(_send(url, salted, concurrency))
        except (StreamError, httpx.HTTPError) as error:
            reason = shown(" ".join(str(error).split())) or type(error).__name__
            raise CommandError(f"{url}: a request failed: {reason}") from error
        except TimeoutError as error:
            raise CommandError(f"{url}: the requests did not end within {PASS_SECONDS:g} seconds") from error
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            # What a stream that is none of ours does to the client that reads it.
            raise CommandError(f"{url}: a stream is not that of a Truedraft server: {shown(str(error))}") from error
    pairs = list(zip(passes[False], passes[True], strict=True))
    return Played(
        ttft=_medians(pairs, lambda trace: [trace.ttft]),
        itl=_medians(pairs, lambda trace: list(trace.gaps)),
        tpot=_medians(pairs, lambda trace: [] if trace.tpot is None else [trace.tpot]),
        compared=rounds * len(bodies),
        different=sum(a.token_ids != b.token_ids for off, on in pairs for a, b in zip(off, on, strict=True)),
        concurrency=concurrency,
        window=watcher.window(),
    )


def _send(url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int) -> list[RequestTrace]:
    async def send() -> list[RequestTrace]:
        async with asyncio.timeout(PASS_SECONDS):
            traces, _ = await closed_loop(f"{url}/v1/completions", bodies, concurrency)
        return traces

    traces = asyncio.run(send())
    for body, trace in zip(bodies, traces, strict=True):
        if not 1 <= trace.num_tokens <= body["max_tokens"] or trace.num_tokens != len(trace.token_ids):
            told = f"{len(trace.token_ids)} ids and counts {shown(trace.num_tokens)}"
            raise StreamError(f"asked for at most {body['max_tokens']} tokens the server sends {told}")
    return traces


def _pass(bodies: Sequence[Mapping[str, Any]], salt: str, speculative: bool) -> list[dict[str, Any]]:
    off = {} if speculative else {"speculation": {"num_speculative_tokens": 0}}
    return [
        {**body, "return_token_ids": True, "cache_salt": f"preflight-{salt}-{i}", **off}
        for i, body in enumerate(bodies)
    ]


def _medians(
    pairs: Sequence[tuple[list[RequestTrace], list[RequestTrace]]], values: Callable[[RequestTrace], list[float]]
) -> Pairs:
    found: Pairs = []
    for pair in pairs:
        # Tokens that all came in one chunk have no time between them.
        off, on = ([value for trace in traces for value in values(trace) if value > 0] for traces in pair)
        if off and on:
            found.append((statistics.median(off), statistics.median(on)))
    return found


class _Watcher:
    """Scrapes a server in a thread of its own for as long as it is open."""

    def __init__(self, url: str) -> None:
        self._reader = Reader(url)
        self._stop = threading.Event()
        self._looks: list[Scrape] = []
        self._error: CommandError | None = None
        self._thread = threading.Thread(target=self._run, name="preflight-scrape", daemon=True)
        self._started = 0.0

    def __enter__(self) -> _Watcher:
        self._info = read_info(self._reader)
        self._first = self._last = read_metrics(self._reader)
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if error[0] is None:
            self._last = read_metrics(self._reader)

    def window(self) -> Window:
        if self._error is not None:
            raise self._error
        looks = [self._first.only(GAUGES), *self._looks, self._last.only(GAUGES)]
        seconds = time.monotonic() - self._started
        return window(self._info, self._first, self._last, looks, seconds, self._reader.url)

    def _run(self) -> None:
        try:
            while not self._stop.wait(GAUGE_SECONDS / 5):
                self._looks.append(read_metrics(self._reader).only(GAUGES))
        except CommandError as error:
            self._error = error
