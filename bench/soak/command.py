"""``python -m bench.soak [--minutes 10] [--json FILE]``: a real server under everything that clients do at once.

Sampling of all kinds, penalties, grammars, chats and tools, streams, clients that leave at any moment, slow readers
and slow senders, bursts over the bound, requests that have to be refused, and faults of the server's own parts. When a
round is over and the clients have gone, nothing of them may be left; in the end a sample of the answers is asked for
again, each alone and without speculation. One line for each invariant; the exit code is 0 if all hold. docs/soak.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.process import ServerStartError
from bench.soak import faults as soak_faults
from bench.soak.checks import Check, Soaked, check_all
from bench.soak.drive import Driver, Record, RoundEnd
from bench.soak.faults import SoakFaults
from bench.soak.log import ServerLog, read_log
from bench.soak.model import NAME, save_soak_model
from bench.soak.outcome import count_kinds
from bench.soak.process import ServerProcess, server_under_test

WARM_SHARE = 0.3  # of the time
ROUND_SECONDS = 30.0  # about
READY_SECONDS = 300.0

_DRAFTS = 8
_AFTER_ABORT = 3 * 12 * (_DRAFTS + 1)  # some steps of all choices of a request
# Small bounds, so that all of them are met.
_FLAGS = {
    "num-blocks": "64",
    "max-model-len": "1024",
    "max-num-seqs": "8",
    "max-num-batched-tokens": "128",
    "max-waiting": "32",
    "num-threads": "1",
    "num-speculative-tokens": str(_DRAFTS),
    "send-timeout": "3",
    "body-timeout": "10",
    "shutdown-timeout": "20",
    "stall-timeout": "60",
    "grammar-cache-memory": "8MiB",
    "log-format": "json",
}
ANSWERED = (  # features of requests
    "completion", "chat", "stream", "whole", "slow reader", "slow sender", "burst", "penalties", "bias", "masks",
    "stop", "json_schema", "json_object", "regex", "choice", "grammar", "tools", "forced tools", "n", "best_of",
    "several prompts", "logprobs", "echo", "prompt_logprobs", "prediction", "deadline",
)  # fmt: skip
_REPLAYED = ("stream", "whole", "chat", "grammars", "forced tools", "penalties", "n")
MUST_HAPPEN = frozenset(
    {
        *(f"answered {feature}" for feature in ANSWERED),
        *(f"replayed {feature}" for feature in _REPLAYED),
        *(f"left leaves {when}" for when in ("in the body", "at once", "after a time", "in the answer")),
        "cut stuck",
        "late deadline",
        "refused refused",
        "refused burst",
        *("accepted drafts", "rejected drafts", "preemptions", "prefix hits", "overload"),
        *("ended by stop", "ended by length", "ended by abort"),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every invariant holds, 1 if one does not, 2 if the server did not start."""
    options = _parser().parse_args(argv)
    if options.minutes <= 0:
        _parser().error("--minutes must be above 0")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="truedraft-soak-") as folder:
        try:
            soaked = _soak(options, Path(folder))
        except ServerStartError as error:
            print(f"soak: {error}", file=sys.stderr)
            return 2
    checks = check_all(soaked)
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}", flush=True)
    failed = [check for check in checks if not check.passed]
    told = f"{len(failed)} of {len(checks)} invariants FAILED" if failed else f"all {len(checks)} invariants hold"
    print(f"soak: {told}, seed {options.seed}, {time.monotonic() - began:.0f} s", flush=True)
    if options.json is not None:
        report = _report(options, soaked, checks)
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the load lasts (10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of what their clients do (0)")
    parser.add_argument("--no-faults", action="store_true", help="a plain server, of which no part fails on command")
    parser.add_argument("--model", metavar="M", help="as for truedraft serve (default: a tiny random model)")
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the server's log there")
    parser.add_argument("flags", nargs="*", help="after --: more flags of truedraft serve")
    return parser


def _soak(options: argparse.Namespace, folder: Path) -> Soaked:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and the server ends with this
    model = options.model or str(save_soak_model(folder / NAME))
    log = options.log or folder / "server.log"
    # What is not exact need not come again: such a model cannot be tested so.
    flags = [f"--{name}={value}" for name, value in _FLAGS.items()] + ["--require-exact", "--model", model]
    module = "server" if options.no_faults else soak_faults.MODULE
    with server_under_test(module, [*flags, *options.flags], log, ready_seconds=READY_SECONDS) as server:
        driver, warm_rounds = asyncio.run(_drive(options, server))
        exit_code = server.stop()
        left = server.left_children()
    must_happen = MUST_HAPPEN
    if not options.no_faults:
        victims = (
            f"{'answered' if point == soak_faults.SPARED else 'failed'} victim of {point}"
            for point in soak_faults.VICTIMS
        )
        must_happen |= {*soak_faults.NAMES, *victims, "ended by error"}
    return Soaked(
        driver.record,
        _read(log),
        num_blocks=driver.num_blocks,
        warm_rounds=warm_rounds,
        exit_code=exit_code,
        left_children=tuple(left),
        must_happen=must_happen,
        tokens_after_abort=_AFTER_ABORT if driver.engine_process else 0,
    )


async def _drive(options: argparse.Namespace, server: ServerProcess) -> tuple[Driver, int]:
    faults = None
    if not options.no_faults:
        faults = SoakFaults(server.address, options.seed)
    driver = await Driver.of(server, options.seed, faults, ANSWERED)
    warm, others = rounds_of(60.0 * options.minutes)
    for seconds in (*warm, *others):
        end = await driver.round(seconds)
        print(_round_line(end, driver.record, warm=len(driver.record.rounds) <= len(warm)), file=sys.stderr, flush=True)
        if not server.running:
            break
    await driver.finish()
    return driver, len(warm)


def rounds_of(seconds: float) -> tuple[list[float], list[float]]:
    """How long the rounds last: those of the warm-up, and at least two others."""
    warm = WARM_SHARE * seconds
    rest = seconds - warm
    count = max(2, round(rest / ROUND_SECONDS))
    return [warm], [rest / count] * count


def _round_line(end: RoundEnd, record: Record, *, warm: bool) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in count_kinds(record.outcomes).items())
    settled = end.left or f"settled in {end.settled_after or 0:.1f} s"
    return (
        f"soak: {'warm-up' if warm else 'round'} of {end.ended - end.began:.0f} s: {kinds}; "
        f"{len(record.fired)} faults; {settled}; {end.memory_bytes / 2**20:.1f} MiB"
    )


def _read(log: Path) -> ServerLog:
    with log.open(encoding="utf-8", errors="replace") as lines:
        return read_log(lines)


def _report(options: argparse.Namespace, soaked: Soaked, checks: Sequence[Check]) -> dict[str, Any]:
    final = soaked.record.final
    fired: dict[str, int] = {}
    for fault in soaked.record.fired:
        fired[fault.name] = fired.get(fault.name, 0) + 1
    return {
        "minutes": options.minutes,
        "seed": options.seed,
        "flags": options.flags,
        "passed": all(check.passed for check in checks),
        "checks": [asdict(check) for check in checks],
        "requests": count_kinds(soaked.record.outcomes),
        "faults": dict(sorted(fired.items())),
        "replays": len(soaked.record.replays),
        "rounds": [
            {
                "seconds": round(end.ended - end.began, 3),
                "requests": end.requests,
                "settled_after": end.settled_after,
                "memory_bytes": end.memory_bytes,
                "kept_bytes": end.kept_bytes,
            }
            for end in soaked.record.rounds
        ],
        "generated_tokens": None if final is None else final.value("generation_tokens_total"),
    }
