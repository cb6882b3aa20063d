"""``python -m bench.quick``: a real server over HTTP, speculation off and on, interleaved, one table.

Off and on run on the same server (the request's ``speculation`` field turns it off), in turn, so that a drift of
the machine's speed hits both. Each round uses a cache_salt of its own: no prefix-cache hit flatters a repetition.
Outputs of off and on are compared token by token in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.client import RequestTrace, closed_loop
from bench.process import server_process
from bench.prompts import COPY_LOAD, MIXED_LOAD, Prompt

COLUMNS = (
    "workload",
    "conc.",
    "spec.",
    "tokens/s",
    "on/off",
    "TTFT ms",
    "ITL ms",
    "ITL p99",
    "TPOT ms",
    "acc. length",
)
WORKLOADS = {"mixed": MIXED_LOAD, "copy": COPY_LOAD}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: medians over rounds and requests."""

    workload: str
    concurrency: int
    speculation: str
    tokens_per_second: float
    ttft_ms: float
    itl_ms: float
    itl_p99_ms: float
    tpot_ms: float
    acceptance_length: float


def _bodies(model: str, prompts: tuple[Prompt, ...], tokens: int, salt: str, k: int | None) -> list[dict[str, Any]]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if k is not None:
        body["speculation"] = {"num_speculative_tokens": k}
    return [{**body, "prompt": prompt.text, "cache_salt": f"{salt}-{i}"} for i, prompt in enumerate(prompts)]


def _row(workload: str, concurrency: int, speculation: str, rounds: list[tuple[list[RequestTrace], float]]) -> Row:
    traces = [trace for round_traces, _ in rounds for trace in round_traces]
    gaps = sorted(gap for trace in traces for gap in trace.gaps)
    steps = sum(trace.spec_steps for trace in traces)
    return Row(
        workload=workload,
        concurrency=concurrency,
        speculation=speculation,
        tokens_per_second=statistics.median(sum(t.num_tokens for t in ts) / wall for ts, wall in rounds),
        ttft_ms=1e3 * statistics.median(t.ttft for t in traces),
        itl_ms=1e3 * statistics.median(gaps),
        itl_p99_ms=1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        tpot_ms=1e3 * statistics.median(t.tpot for t in traces if t.tpot is not None),
        acceptance_length=1 + sum(t.accepted for t in traces) / steps if steps else 1.0,
    )


def _measure(base: str, args: argparse.Namespace) -> tuple[list[Row], int, int]:
    model = httpx.get(f"{base}/v1/models", trust_env=False).json()["data"][0]["id"]
    return asyncio.run(_measure_all(f"{base}/v1/completions", model, args))


async def _measure_all(url: str, model: str, args: argparse.Namespace) -> tuple[list[Row], int, int]:
    rows: list[Row] = []
    compared = different = 0
    for workload in args.workloads:
        prompts = WORKLOADS[workload]
        await closed_loop(url, _bodies(model, prompts[:4], 16, "warm-up", None), 4)
        for concurrency in args.concurrency:
            chosen = prompts[: min(args.prompts, max(4, concurrency))]
            off: list[tuple[list[RequestTrace], float]] = []
            on: list[tuple[list[RequestTrace], float]] = []
            for number in range(args.rounds):
                for label, k, into in (("off", 0, off), ("on", None, on)):
                    salt = f"{workload}-{concurrency}-{number}-{label}"
                    into.append(await closed_loop(url, _bodies(model, chosen, args.tokens, salt, k), concurrency))
                    print(
                        f"  {workload}, concurrency {concurrency}, round {number + 1}, speculation {label}",
                        file=sys.stderr,
                    )
                for a, b in zip(off[-1][0], on[-1][0], strict=True):
                    compared += 1
                    different += a.token_ids != b.token_ids
            rows += [_row(workload, concurrency, "off", off), _row(workload, concurrency, "on", on)]
    return rows, compared, different


def _table(rows: list[Row]) -> str:
    lines: list[tuple[str, ...]] = [COLUMNS]
    for i, row in enumerate(rows):
        ratio = f"{row.tokens_per_second / rows[i - 1].tokens_per_second:.2f}" if row.speculation == "on" else ""
        lines.append(
            (
                row.workload,
                str(row.concurrency),
                row.speculation,
                f"{row.tokens_per_second:.1f}",
                ratio,
                f"{row.ttft_ms:.0f}",
                f"{row.itl_ms:.1f}",
                f"{row.itl_p99_ms:.1f}",
                f"{row.tpot_ms:.1f}",
                f"{row.acceptance_length:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quick", description=__doc__)
    parser.add_argument("--url", help="measure this running Truedraft server instead of starting one")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["mixed", "copy"])
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--prompts", type=int, default=16, help="requests of a round, at most 16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("server_flags", nargs="*", help="after --: flags for the server that is started")
    args = parser.parse_args(argv)
    if args.url:
        rows, compared, different = _measure(args.url.rstrip("/"), args)
    else:
        with tempfile.TemporaryDirectory() as folder, server_process(args.server_flags, Path(folder) / "log") as base:
            rows, compared, different = _measure(base, args)
    print(_table(rows))
    print(f"\noutputs of off and on: {compared - different} of {compared} requests identical, token for token")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
