"""Measure how long the event loop stands still under requests that ask for much.

::

    python -m bench.event_loop                                    # the default model, every load
    python -m bench.event_loop --load regexes --apart --json lag.json -- --model FOLDER --num-threads 2

Behind ``--`` come the flags of ``truedraft serve``. The server runs in this process, its clients in another. Exit code
0: in no load the loop came more than ``--limit`` milliseconds late, and no answer was a failure of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.event_loop.loads import LOADS
from bench.event_loop.probe import Lag, LoopProbe
from bench.serving_here import serving, settings_of
from model.errors import ModelError
from model.source_error import ModelSourceError
from server.assemble import StartError, build_service
from server.service import Service
from server.settings import SettingsError

IDLE, STREAMS = "idle", "streams alone"
CASES = (IDLE, STREAMS, *LOADS)


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    answers: dict[str, int]  # by status, or by the name of the client's error
    lag: Lag

    def problem(self, limit_ms: float) -> str | None:
        """What is wrong with it, as a line; None if nothing is."""
        failed = {status: count for status, count in self.answers.items() if not _answered(status)}
        if failed:
            return f"{self.case}: the server failed: {failed}"
        if self.lag.max_ms > limit_ms:
            return f"{self.case}: the loop came {self.lag.max_ms:.0f} ms late; {limit_ms:g} are allowed"
        if not self.lag.wakes or not (self.answers or self.case == IDLE):
            return f"{self.case}: nothing was measured"
        return None


def _answered(status: str) -> bool:
    return status == "503" or (status.isdigit() and int(status) < 500)


@dataclass(frozen=True, slots=True)
class Plan:
    cases: tuple[str, ...]
    seconds: float  # of each case; requests under way then go on to their end
    workers: int  # clients that send the case's load
    streams: int  # plain streams beside it


async def measure(service: Service, plan: Plan) -> list[Result]:
    """Serve ``service`` from this loop, and watch the loop in every case."""
    probe, results = LoopProbe(), []
    async with serving(service) as url:
        for case in plan.cases:
            if case == IDLE:
                async with probe.watching():
                    await asyncio.sleep(plan.seconds)
                results.append(Result(case, {}, probe.lag))
                continue
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bench.event_loop.client", url, service.facts.names[0], case, str(plan.seconds),
                str(plan.workers), str(plan.streams), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert client.stdin is not None
            assert client.stdout is not None
            try:
                await client.stdout.readline()  # it is ready: its own start is not part of the case
                async with probe.watching():
                    client.stdin.write(b"\n")
                    said = await client.stdout.readline()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    client.terminate()
                await client.wait()
            results.append(Result(case, json.loads(said or b"{}"), probe.lag))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:split])
    cases = tuple(chosen_cases(options.load or CASES, options.apart))
    plan = Plan(cases, options.seconds, options.workers, options.streams)
    try:
        service = build_service(settings_of(given[split + 1 :]), lambda line: print(line, file=sys.stderr))
    except (SettingsError, StartError, ModelError, ModelSourceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return report(asyncio.run(measure(service, plan)), options.limit, options.json)


def chosen_cases(groups: Sequence[str], apart: bool) -> list[str]:
    """``apart``: the loads of each group as cases of their own."""
    cases: list[str] = []
    for group in groups:
        names = LOADS.get(group, ()) if apart else ()
        cases += [f"{group}: {name}" for name in names] or [group]
    return cases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.event_loop", description=(__doc__ or "").splitlines()[0], epilog="-- flags of serve"
    )
    parser.add_argument("--load", action="append", choices=CASES, help="only this one; may be given again")
    parser.add_argument("--apart", action="store_true", help="each request of a load by itself")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--workers", type=int, default=4, help="clients that send it")
    parser.add_argument("--streams", type=int, default=2, help="plain streams beside it")
    parser.add_argument("--limit", type=float, default=100.0, help="milliseconds that the loop may be late")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results as JSON")
    return parser


def report(results: Sequence[Result], limit_ms: float, file: Path | None) -> int:
    """Print the table; the exit code."""
    width = 2 + max(len(result.case) for result in results)
    print(f"{'load':<{width}}{'answers':>9}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}")
    for result in results:
        lag = result.lag
        count = sum(result.answers.values())
        print(f"{result.case:<{width}}{count:>9}{lag.p50_ms:>9.2f}{lag.p99_ms:>9.2f}{lag.max_ms:>9.2f}")
    if file is not None:
        file.write_text(json.dumps({"limit_ms": limit_ms, "results": list(map(asdict, results))}, indent=1), "utf-8")
    problems = [problem for result in results if (problem := result.problem(limit_ms)) is not None]
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
