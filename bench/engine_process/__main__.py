"""Compare the engine in the server's process with the engine in one of its own, over HTTP and interleaved.

::

    python -m bench.engine_process                                     # the default model
    python -m bench.engine_process --rounds 5 --json cells.json -- --num-threads 2

Behind ``--`` come the flags of ``truedraft serve``, for both servers. Both run all the time and take turns: a round of
one, the same round of the other, in changing order, so that a drift of the machine's speed hits both. Each round has a
cache salt of its own. The loads: ``streams``; ``logprobs``, streams with 20 logprobs a token; ``large``, streams beside
a client who has long texts tokenized all the time. Of each: tokens a second, the gaps between chunks (ITL) as a
client sees them, and how late the server's event loop comes (lag).

Exit code 0: both gave every request the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from bench.client import closed_loop
from bench.engine_process.cells import APART, HERE, MODES, Round, Row, differences, rows_of, table
from bench.engine_process.server import PATH
from bench.event_loop.probe import Lag
from bench.process import server_process
from bench.prompts import MIXED_LOAD, Prompt

LOADS = ("streams", "logprobs", "large")
LARGE_TEXT = "The river rises in the hills above the old town and runs south for ninety miles. " * 700
MODULE = "bench.engine_process.server"


def bodies(model: str, load: str, prompts: Sequence[Prompt], tokens: int, salt: str) -> list[dict[str, Any]]:
    """Of one round. The salt keeps rounds and servers from sharing a prefix or a past output."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if load == "logprobs":
        body["logprobs"] = 20
    return [{**body, "prompt": prompt.text, "cache_salt": f"{salt}-{i}"} for i, prompt in enumerate(prompts)]


async def run_round(url: str, load: str, requests: Sequence[dict[str, Any]], concurrency: int) -> Round:
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        (await client.post(PATH)).raise_for_status()
        async with _beside(client, load):
            traces, wall = await closed_loop(f"{url}/v1/completions", requests, concurrency)
        lag = Lag(**(await client.get(PATH)).raise_for_status().json())
    return Round(tuple(traces), wall, lag)


@contextlib.asynccontextmanager
async def _beside(client: httpx.AsyncClient, load: str) -> AsyncIterator[None]:
    """Who asks for something else meanwhile."""

    async def tokenize() -> None:
        while True:
            (await client.post("/tokenize", json={"prompt": LARGE_TEXT})).raise_for_status()

    working = asyncio.create_task(tokenize()) if load == "large" else None
    try:
        yield
    finally:
        if working is not None:
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working


async def measure(urls: dict[str, str], args: argparse.Namespace) -> tuple[list[Row], int, int]:
    """The rows, and how many requests were compared and differed."""
    async with httpx.AsyncClient(base_url=urls[HERE], trust_env=False) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    rows: list[Row] = []
    compared = different = 0
    for url in urls.values():
        await closed_loop(f"{url}/v1/completions", bodies(model, "streams", MIXED_LOAD[:4], 16, "warm-up"), 4)
    for load in args.loads:
        for concurrency in args.concurrency:
            prompts = MIXED_LOAD[: min(args.prompts, max(4, concurrency))]
            rounds: dict[str, list[Round]] = {mode: [] for mode in MODES}
            for number in range(args.rounds):
                requests = bodies(model, load, prompts, args.tokens, f"{load}-{concurrency}-{number}")
                for mode in MODES if number % 2 == 0 else reversed(MODES):
                    rounds[mode].append(await run_round(urls[mode], load, requests, concurrency))
                    print(f"  {load}, concurrency {concurrency}, round {number + 1}, {mode}", file=sys.stderr)
            more, differing = differences(rounds[HERE], rounds[APART])
            compared, different = compared + more, different + differing
            rows += rows_of(load, concurrency, rounds[HERE], rounds[APART])
    return rows, compared, different


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m bench.engine_process",
        description=(__doc__ or "").splitlines()[0],
        epilog="-- flags of truedraft serve",
    )
    found.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    found.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    found.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    found.add_argument("--prompts", type=int, default=16, help="requests of a round, at most 16")
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument("--json", type=Path, metavar="FILE", help="the rows as JSON")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    args, flags = parser().parse_args(given[:split]), given[split + 1 :]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        urls = {}
        for mode, more in ((HERE, ["--no-engine-process"]), (APART, ["--engine-process"])):
            log = Path(folder) / f"{mode}.log"
            urls[mode] = servers.enter_context(server_process([*flags, *more], log, module=MODULE))
        rows, compared, different = asyncio.run(measure(urls, args))
    print(table(rows))
    print(f"\noutputs: {compared - different} of {compared} requests identical, token for token")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"compared": compared, "different": different, "rows": list(map(asdict, rows))})
        )
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
