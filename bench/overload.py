"""More requests at once than a server takes in: each must end in an answer or in a clear refusal.

::

    python -m bench.overload                          # 2,000 requests, against a tiny model in a server of its own
    python -m bench.overload --url http://127.0.0.1:8000 --requests 500

Two runs. In the first each request is sent once: what is no whole answer must be a 503 that says when to come back. In
the second OpenAI's own client sends them, with its two retries, and all must be answered in the end. Then nothing may
be left in the server, and its count of refusals must be that of the clients. One line for each of these; the exit code
is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

SEATS, ROOM, ROOM_TOKENS = 8, 64, 4096
MODEL = "tiny"
FLAGS = (
    "--served-model-name", MODEL, "--max-num-seqs", str(SEATS), "--max-waiting", str(ROOM),
    "--max-waiting-tokens", str(ROOM_TOKENS), "--num-blocks", "256", "--num-threads", "1", "--log-level", "error",
)  # fmt: skip
REFUSED, ANSWERED = "refused", "answered"
SECONDS = 600.0


@dataclass(slots=True)
class Run:
    """How the requests of one run ended."""

    ends: Counter[str] = field(default_factory=Counter)  # REFUSED, ANSWERED, or what is wrong with the end
    num_refusals: int = 0  # 503s, those included that were followed by a retry

    @property
    def wrong(self) -> dict[str, int]:
        return {end: count for end, count in self.ends.items() if end not in (REFUSED, ANSWERED)}


def bodies(num_requests: int, model: str, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of all lengths, some of them lists; half of the answers streamed."""
    rng = random.Random(seed)
    made = []
    for i in range(num_requests):
        text = "the river and the road " * rng.choice((1, 1, 2, 8))
        prompt = [text, "the old mill"] if rng.random() < 0.1 else text
        made.append(
            {"model": model, "prompt": prompt, "max_tokens": rng.choice((1, 4, 8)), "seed": i, "stream": i % 2 == 1}
        )
    return made


async def send_once(base: str, requests: Sequence[dict[str, Any]]) -> Run:
    """All at once, each one time."""
    run = Run()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=SECONDS, limits=limits, trust_env=False) as client:

        async def one(body: dict[str, Any]) -> None:
            try:
                response = await client.post("/v1/completions", json=body)
            except httpx.HTTPError as error:
                run.ends[f"no answer: {type(error).__name__}"] += 1
                return
            run.ends[judge(body, response.status_code, response.headers, response.content)] += 1

        await asyncio.gather(*map(one, requests))
    run.num_refusals = run.ends[REFUSED]
    return run


def judge(body: dict[str, Any], status: int, headers: httpx.Headers, content: bytes) -> str:
    """ANSWERED for a whole answer, REFUSED for a 503 in due form, else what is wrong."""
    if status == 503:
        code = json.loads(content)["error"]["code"]
        seconds = headers.get("retry-after", "")
        return REFUSED if code == "overloaded" and seconds.isdigit() and int(seconds) >= 1 else f"a bare 503 {code}"
    if status != 200:
        return f"status {status}"
    num_prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    if body["stream"]:
        *events, last = content.decode().strip().split("\n\n")
        if last != "data: [DONE]":
            return "a stream without an end"
        parsed = [json.loads(event.removeprefix("data: ")) for event in events]
        if any("error" in event for event in parsed):
            return "an error in a stream"
        choices = [choice for event in parsed for choice in event["choices"]]
    else:
        choices = json.loads(content)["choices"]
    ends = Counter(choice["index"] for choice in choices if choice["finish_reason"] is not None)
    return ANSWERED if ends == Counter(range(num_prompts)) else f"an answer with the ends {dict(ends)}"


async def send_with_openai(base: str, requests: Sequence[dict[str, Any]]) -> Run:
    """All at once by OpenAI's client, with its default retries."""
    import openai  # only this command and tests need it

    run = Run()
    # Its pool holds a thousand connections; a client that waits for one is not being retried. It has five seconds to
    # connect, but on a busy machine two thousand clients in one process need longer, whatever the server does.
    async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", timeout=SECONDS) as client:

        async def one(body: dict[str, Any]) -> None:
            try:
                raw = await client.completions.with_raw_response.create(**body)
                run.num_refusals += raw.retries_taken
                parsed = raw.parse()
                if body["stream"]:
                    choices = [choice async for chunk in parsed for choice in chunk.choices]
                else:
                    choices = parsed.choices
            except openai.APIError as error:
                run.ends[f"{type(error).__name__}: {error}"[:100]] += 1
                return
            num_ends = sum(choice.finish_reason is not None for choice in choices)
            num_prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
            run.ends[ANSWERED if num_ends == num_prompts else f"an answer with {num_ends} ends"] += 1

        await asyncio.gather(*map(one, requests))
    return run


async def left_behind(base: str) -> dict[str, float]:
    """What should be 0 a while after the last request."""
    found: dict[str, float] = {}
    async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
        for _ in range(100):
            text = (await client.get("/metrics")).text
            found = {
                "running": sample(text, "num_requests_running"),
                "waiting": sample(text, "num_requests_waiting"),
                "blocks in use": sample(text, "kv_blocks", 'state="used"'),
            }
            if not any(found.values()):
                break
            await asyncio.sleep(0.05)
    return found


async def count_refusals(base: str) -> float:
    """As the server counts them."""
    async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
        text = (await client.get("/metrics")).text
    reasons = ("queue_full", "queue_tokens")
    return sum(sample(text, "admission_rejections_total", f'reason="{reason}"') for reason in reasons)


def sample(text: str, name: str, label: str = "") -> float:
    lines = [line for line in text.splitlines() if line.startswith(f"truedraft_{name}{{") and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def check(once: Run, retried: Run, num_requests: int, counted: float, left: dict[str, float]) -> list[tuple[bool, str]]:
    """(whether it holds, the line that says so) of each invariant."""
    return [
        (
            not once.wrong and once.ends.total() == num_requests,
            f"sent once: {once.ends[ANSWERED]:,} of {num_requests:,} answered, {once.ends[REFUSED]:,} clearly refused"
            + "".join(f", {count:,} {end}" for end, count in once.wrong.items()),
        ),
        (once.ends[REFUSED] > 0, "the run went over the bounds"),
        (
            retried.ends == Counter({ANSWERED: num_requests}),
            f"with OpenAI's client: {retried.ends[ANSWERED]:,} of {num_requests:,} answered, "
            f"after {retried.num_refusals:,} refusals" + "".join(f", {n:,} {end}" for end, n in retried.wrong.items()),
        ),
        (
            counted == once.num_refusals + retried.num_refusals or bool(retried.wrong),
            f"refusals: {once.num_refusals + retried.num_refusals:,} seen, {counted:,.0f} counted by the server",
        ),
        (not any(left.values()), "left in the server: " + ", ".join(f"{n:,.0f} {what}" for what, n in left.items())),
    ]


async def run_both(base: str, model: str, num_requests: int) -> list[tuple[bool, str]]:
    requests = bodies(num_requests, model)
    before = await count_refusals(base)
    once = await send_once(base, requests)
    retried = await send_with_openai(base, requests)
    counted = await count_refusals(base) - before
    return check(once, retried, num_requests, counted, await left_behind(base))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000, help="how many, at once")
    parser.add_argument("--url", help="a running server; without it one with a tiny model is started")
    arguments = parser.parse_args(argv)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a descriptor, in the server too
    if arguments.url is not None:
        url = arguments.url.rstrip("/")
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        return _report(asyncio.run(run_both(url, model, arguments.requests)))
    from bench.process import server_process
    from bench.tiny_models import save_tiny_model

    with tempfile.TemporaryDirectory(prefix="truedraft-overload-") as name:
        folder = save_tiny_model("llama", Path(name) / MODEL)
        with server_process(["--model", str(folder), *FLAGS], Path(name) / "log") as base:
            return _report(asyncio.run(run_both(base, MODEL, arguments.requests)))


def _report(lines: list[tuple[bool, str]]) -> int:
    for holds, line in lines:
        print(f"{'ok  ' if holds else 'FAIL'} {line}", flush=True)
    return 0 if all(holds for holds, _ in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
