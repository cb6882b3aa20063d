"""Where a server's time goes beside its forwards, under load: the gap between forwards, and the CPU of every thread.

::

    python -m bench.host                                         # the default model, 16 streams, without speculation
    python -m bench.host --streams 16 --seconds 20 --json host.json -- --num-speculative-tokens 4

Behind ``--`` come the flags of ``truedraft serve``. The server runs in this process; its client, in another, is niced,
since it would otherwise take from the server the cores that it has elsewhere. Counted are steps in which every stream
decodes and no prompt is taken in. Exit code 0: the gap is within ``--gap`` of the time, other CPU within ``--other``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.engine_here import with_engine_here
from bench.serving_here import serving, settings_of
from model.errors import ModelError
from model.source_error import ModelSourceError
from scheduler.stats import StepRecord
from server.assemble import StartError, build_service
from server.service import Service
from server.settings import SettingsError
from specdec.plan import STAGES

FORWARD = "verify"
LOOP, MODEL, POOL = "event loop", "model thread", "threads of the forward"
_MODEL_PREFIX = "model"


@dataclass(slots=True)
class Gaps:
    """Wall seconds of full steps, by what they went into. Hears every record of a server's engine."""

    streams: int
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[float] = field(default_factory=list)  # seconds of each, from record to record
    _last: float | None = None  # when the record before came, if its step was full

    def hear(self, record: StepRecord) -> None:
        """The next record."""
        now = time.perf_counter()
        step = record.step
        full = step is not None and len(record.sequences) == self.streams and record.num_prefill_tokens == 0
        if full and step is not None and self._last is not None:
            wall = now - self._last
            self.steps.append(wall)
            for stage in STAGES:
                self.parts[stage] += step.stage_seconds.get(stage, 0.0)
            inside = sum(step.stage_seconds.values())
            self.parts["to the model thread and back"] += record.step_seconds - inside
            self.parts["deciding and applying"] += record.overhead_seconds
            self.parts["between steps"] += wall - record.step_seconds - record.overhead_seconds
        self._last = now if full else None

    @property
    def gap_share(self) -> float:
        """Of the time of full steps that was no forward."""
        total = sum(self.steps)
        return 1.0 - self.parts[FORWARD] / total if total else 0.0


def cpu_seconds() -> dict[str, float]:
    """CPU time of this process's threads so far, by name; Linux only."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    names[threading.main_thread().native_id] = LOOP
    found: dict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that ends
            user, system = task.joinpath("stat").read_text().rsplit(")", 1)[1].split()[11:13]
            name = names.get(int(task.name), POOL)
            found[MODEL if name.startswith(_MODEL_PREFIX) else name] += (int(user) + int(system)) / os.sysconf(
                "SC_CLK_TCK"
            )
    return dict(found)


@dataclass(frozen=True, slots=True)
class Found:
    streams: int
    steps: int
    step_ms: float  # median
    gap_share: float
    parts: Mapping[str, float]  # shares of the time of full steps
    cpu: Mapping[str, float]  # CPU seconds a second, by thread

    @property
    def other_share(self) -> float:
        """CPU of everything but the model's threads, over the time."""
        return sum(share for name, share in self.cpu.items() if name not in (MODEL, POOL))


async def measure(service: Service, streams: int, seconds: float) -> Found:
    """Load ``service`` with ``streams`` for about so long."""
    gaps = Gaps(streams)
    told = service.engine.on_step

    def on_step(record: StepRecord) -> None:
        if told is not None:
            told(record)
        gaps.hear(record)

    service.engine.on_step = on_step
    async with serving(service) as url:
        client = await asyncio.create_subprocess_exec(
            "nice", "-n", "19", sys.executable, "-m", "bench.host.client", url, service.facts.names[0],
            str(streams), str(seconds), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            await client.stdout.readline()  # it is ready
            client.stdin.write(b"\n")
            await asyncio.sleep(0.1 * seconds)
            before, began = cpu_seconds(), time.perf_counter()
            await asyncio.sleep(0.8 * seconds)
            after, ended = cpu_seconds(), time.perf_counter()
            await client.stdout.readline()
        finally:
            with contextlib.suppress(ProcessLookupError):
                client.terminate()
            await client.wait()
    total = sum(gaps.steps)
    return Found(
        streams=streams,
        steps=len(gaps.steps),
        step_ms=statistics.median(gaps.steps) * 1e3 if gaps.steps else 0.0,
        gap_share=gaps.gap_share,
        parts={name: taken / total for name, taken in gaps.parts.items()} if total else {},
        cpu={name: (after[name] - before.get(name, 0.0)) / (ended - began) for name in after},
    )


def problems(found: Found, gap: float, other: float) -> list[str]:
    """What is wrong with it, as lines."""
    if not found.steps:
        return ["no step had every stream: nothing was measured"]
    lines = []
    if found.gap_share > gap:
        lines.append(f"the gap between forwards is {found.gap_share:.1%} of the time; {gap:.0%} are allowed")
    if found.other_share > other:
        lines.append(f"other threads took {found.other_share:.1%} of a core; {other:.0%} are allowed")
    return lines


def told(found: Found) -> str:
    """The tables for people."""
    width = 2 + max(map(len, (*found.parts, *found.cpu)))
    lines = [
        f"{found.streams} streams: {found.steps} full steps of {found.step_ms:.2f} ms, "
        f"{found.gap_share:.1%} of it no forward"
    ]
    lines += [f"  {name:<{width}}{share:>7.1%}" for name, share in found.parts.items()]
    lines.append(f"CPU, of one core; all but the model's: {found.other_share:.1%}")
    ordered = sorted(found.cpu.items(), key=lambda one: -one[1])
    lines += [f"  {name:<{width}}{share:>7.1%}" for name, share in ordered if share >= 0.0005]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if a limit is missed or the server cannot start."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description=(__doc__ or "").splitlines()[0], epilog="-- flags of serve"
    )
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="that decode at once (16)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of load (20)")
    parser.add_argument("--gap", type=float, default=0.05, metavar="SHARE", help="of the time between forwards (0.05)")
    parser.add_argument("--other", type=float, default=0.15, metavar="SHARE", help="of a core, for the rest (0.15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(given[:split])
    try:
        flags = given[split + 1 :] or ["--num-speculative-tokens", "0"]
        settings = with_engine_here(settings_of(flags), "the steps and their threads are watched in this process")
        service = build_service(settings, lambda line: print(f"host: {line}", file=sys.stderr))
    except (SettingsError, StartError, ModelError, ModelSourceError) as error:
        print(f"host: {error}", file=sys.stderr)
        return 1
    found = asyncio.run(measure(service, options.streams, options.seconds))
    print(told(found))
    if options.json is not None:
        options.json.write_text(json.dumps({**asdict(found), "other_share": found.other_share}, indent=2) + "\n")
    missed = problems(found, options.gap, options.other)
    for line in missed:
        print(f"host: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
