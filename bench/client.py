"""A streaming load client for any OpenAI-compatible completions endpoint: what one request saw, as plain data."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from bench.api_key import key_headers

MAX_LINE_BYTES = 2**20  # of a stream


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Times are seconds. ``gaps`` are the times between chunks that carried tokens."""

    ttft: float
    e2e: float
    gaps: tuple[float, ...]
    num_tokens: int
    token_ids: tuple[int, ...]  # empty where the server does not return ids
    spec_steps: int
    accepted: int
    drafted: int

    @property
    def tpot(self) -> float | None:
        """(last - first) / (n - 1); None for fewer than two tokens."""
        return sum(self.gaps) / (self.num_tokens - 1) if self.num_tokens > 1 else None


class StreamError(RuntimeError):
    """The server answered with an error, before or after the stream began."""


async def stream_completion(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> RequestTrace:
    """POST ``body`` with streaming on and follow the answer to its end. Raises StreamError on any error answer."""
    payload = {**body, "stream": True, "stream_options": {"include_usage": True}}
    started = time.perf_counter()
    first = last = 0.0
    gaps: list[float] = []
    token_ids: list[int] = []
    usage: dict[str, Any] = {}
    spec: dict[str, Any] = {}
    async with client.stream("POST", url, json=payload) as response:
        if response.status_code != 200:
            raise StreamError(f"HTTP {response.status_code}: {(await response.aread())[:400]!r}")
        async for line in _lines(response):
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            event = json.loads(line[6:])
            if "error" in event:
                raise StreamError(str(event["error"]))
            usage = event.get("usage") or usage
            spec = (event.get("metrics") or {}).get("speculative_decoding") or spec
            ids = [i for choice in event["choices"] for i in choice.get("token_ids") or ()]
            if not ids and not any(choice.get("text") for choice in event["choices"]):
                continue
            token_ids += ids
            if first:
                gaps.append(now - last)
            else:
                first = now
            last = now
    return RequestTrace(
        ttft=first - started,
        e2e=last - started,
        gaps=tuple(gaps),
        num_tokens=int(usage.get("completion_tokens", len(token_ids))),
        token_ids=tuple(token_ids),
        spec_steps=int(spec.get("num_spec_steps", 0)),
        accepted=int(spec.get("num_accepted_draft_tokens", 0)),
        drafted=int(spec.get("num_draft_tokens", 0)),
    )


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """As ``aiter_lines`` of events, but no line may be longer than MAX_LINE_BYTES."""
    left = b""
    async for piece in response.aiter_bytes():
        *lines, left = (left + piece).split(b"\n")
        if len(left) > MAX_LINE_BYTES:
            raise StreamError(f"a line of the stream is longer than {MAX_LINE_BYTES:,} bytes")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
    yield left.decode("utf-8", "replace")


async def closed_loop(
    url: str, bodies: Sequence[Mapping[str, Any]], concurrency: int
) -> tuple[list[RequestTrace], float]:
    """Send all ``bodies``, at most ``concurrency`` at a time; returns the traces in order and the wall time (s)."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
    options: dict[str, Any] = {"headers": key_headers(), "timeout": httpx.Timeout(600.0), "limits": limits}
    async with httpx.AsyncClient(**options, trust_env=False) as client:

        async def one(body: Mapping[str, Any]) -> RequestTrace:
            async with gate:
                return await stream_completion(client, url, body)

        started = time.perf_counter()
        traces = await asyncio.gather(*(one(body) for body in bodies))
        return list(traces), time.perf_counter() - started
