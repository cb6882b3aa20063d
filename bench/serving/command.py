"""``truedraft bench`` on the command line. Cheap to import: the rest comes with the first line of ``run``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands import CommandError, Report

if TYPE_CHECKING:
    from bench.serving.options import Options

HELP = (
    "measure a server over HTTP: equivalence, acceptance, draft cost, ITL, TTFT, alignment, fragmentation, throughput"
)
DEFAULT_FOLDER = Path("truedraft-bench")
WORKLOAD_NAMES = ("chat", "copy", "json", "long", "mixed", "shared")
MODES = ("off", "k4", "auto")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="as for serve: the model of the server that is started (default: the default model)")
    add(
        "--target",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="measure this running server of OpenAI's API instead; may be repeated: then they are compared",
    )
    add("--served-model", metavar="NAME", help="what the target calls the model (default: its first)")
    add(
        "--api-key-env",
        default="TRUEDRAFT_API_KEY",
        metavar="NAME",
        help="environment variable with the target's API key (TRUEDRAFT_API_KEY)",
    )
    add("--workload", nargs="+", choices=WORKLOAD_NAMES, metavar="W", help=f"of {', '.join(WORKLOAD_NAMES)} (mixed)")
    add("--prompts", type=Path, metavar="FILE", help="prompts of your own instead, JSON or JSONL (docs/bench.md)")
    add("--concurrency", nargs="+", type=int, metavar="C", help="closed loops: so many requests at a time (1 8)")
    add("--rate", nargs="+", type=float, metavar="R", help="open loops: so many requests a second, at random times")
    add(
        "--mode",
        nargs="+",
        metavar="M",
        help="off, auto (as the server decides), k4 (four drafts), k4:ngram (of that drafter); the first is what the "
        f"others are compared with ({' '.join(MODES)})",
    )
    add(
        "--block-sizes",
        metavar="SIZES",
        help="as 1,4,16,64: start a server for each and compare them; --mode is auto then, --workload shared",
    )
    add("--rounds", type=int, default=3, metavar="N", help="rounds of each cell, modes in turns (3)")
    add("--requests", type=int, metavar="N", help="of each round (2 a seat, at least 8; open loop: 20 seconds' worth)")
    add("--tokens", type=int, default=64, metavar="N", help="output tokens of a request (64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="above 0 each prompt has a seed of its own (0)")
    add("--seed", type=int, default=0, metavar="N", help="of the seeds and of the open loop's times (0)")
    add("--natural-end", action="store_true", help="an answer may end before --tokens")
    add("--api", choices=("completions", "chat"), default="completions", help="the endpoint (completions)")
    add(
        "--slo",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="goodput counts requests within it: ttft, tpot, itl or e2el and milliseconds; may be repeated",
    )
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds without a byte until a request failed (300)")
    add("--nice", type=int, default=5, metavar="N", help="niceness of the client's thread, 0 to 19 (5)")
    add("--report", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=f"where the reports go ({DEFAULT_FOLDER})")
    add("serve_flags", nargs="*", metavar="-- FLAGS", help="flags of serve, for the server that is started")


def run(arguments: argparse.Namespace, report: Report) -> int:
    """0 if every output was alike and every request was answered or refused; else 1."""
    options = read_options(arguments)
    from bench.serving.bench import run_bench

    return run_bench(options, report)


def read_options(arguments: argparse.Namespace) -> Options:
    """Raises CommandError with the flag that is wrong."""
    from bench.serving import options as o

    _check_numbers(arguments)
    targets = tuple(o.parse_target(text) for text in arguments.target)
    o.unique([target.name for target in targets], "--target")
    sizes = o.parse_sizes(arguments.block_sizes) if arguments.block_sizes else ()
    if targets and (sizes or arguments.serve_flags or arguments.model):
        given = "--block-sizes" if sizes else "--model" if arguments.model else "flags of serve"
        raise CommandError(f"{given} and --target exclude each other: a target runs already")
    if arguments.prompts is not None and arguments.workload:
        raise CommandError("--prompts and --workload exclude each other")
    if any(flag.partition("=")[0] == "--model" for flag in arguments.serve_flags):
        raise CommandError("--model belongs in front of --")
    loads = [o.Load(seats=seats) for seats in sorted(set(arguments.concurrency or ()))]
    loads += [o.Load(rate=rate) for rate in sorted(set(arguments.rate or ()))]
    if not loads:
        loads = [o.Load(seats=8)] if sizes else [o.Load(seats=1), o.Load(seats=8)]
    most = max((load.seats for load in loads if load.seats is not None), default=0)
    if arguments.requests is not None and arguments.requests < most:
        raise CommandError(f"--requests {arguments.requests} cannot fill --concurrency {most}")
    modes = arguments.mode or (["auto"] if sizes else list(MODES))
    default_workload = ["shared"] if sizes else ["mixed"]
    return o.Options(
        workloads=tuple(dict.fromkeys(arguments.workload or default_workload)),
        prompts=arguments.prompts,
        loads=tuple(loads),
        modes=tuple(o.parse_mode(text) for text in o.unique(modes, "--mode")),
        slos=tuple(o.parse_slo(text) for text in arguments.slo),
        size=o.Size(
            rounds=arguments.rounds,
            tokens=arguments.tokens,
            requests=arguments.requests,
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=not arguments.natural_end,
            chat=arguments.api == "chat",
            timeout=arguments.timeout,
        ),
        targets=targets,
        served_model=arguments.served_model,
        api_key_env=arguments.api_key_env,
        block_sizes=sizes,
        serve_flags=(*(["--model", arguments.model] if arguments.model else []), *arguments.serve_flags),
        nice=arguments.nice,
        folder=arguments.report,
        command=shlex.join(["truedraft", *sys.argv[1:]]),
    )


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name, least, most in (
        ("rounds", 1, 1000),
        ("requests", 1, 1_000_000),
        ("tokens", 2, 1_000_000),
        ("temperature", 0, 2),
        ("seed", 0, 2**52),
        ("timeout", 1, 86_400),
        ("nice", 0, 19),
    ):
        _within(f"--{name}", getattr(arguments, name), least, most)
    for seats in arguments.concurrency or ():
        _within("--concurrency", seats, 1, 10_000)
    for rate in arguments.rate or ():
        _within("--rate", rate, 0.001, 100_000)
    folder = arguments.report
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise CommandError(f"cannot write to --report {folder}: it is no folder that can be written to")


def _within(flag: str, value: Any, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise CommandError(f"{flag} must be from {least:,} to {most:,}, got {value:g}")
