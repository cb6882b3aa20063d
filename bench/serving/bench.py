"""One run of ``truedraft bench``: servers, targets, cells, reports."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.serving.niced import ClientThread
from bench.serving.options import SERVER, Mode, NamedTarget, Options
from bench.serving.plan import LoadCell, Variant, optional_fields
from bench.serving.result import result_objects, whole_report
from bench.serving.runner import BenchRun, Runner
from bench.serving.servers import Child, start_servers
from bench.serving.table import LEGEND, missing_lines, table
from bench.serving.target import Target, find_fields, open_target
from bench.serving.wire import Client
from bench.serving.workloads import OWN, WorkloadPrompt, load_workload, read_prompts
from bench.verify.report import check_folder, write_atomically
from server.commands import CommandError, Report

SIZED_MEMORY = "512MiB"  # of the KV cache of each server, where one runs for each block size
STARTED = "server"


def run_bench(options: Options, report: Report) -> int:
    """The exit code. Raises CommandError for what the user can mend; Ended after a signal, with the report written."""
    try:
        check_folder(options.folder)
    except OSError as error:
        raise CommandError(f"cannot write to --report {options.folder}: {error.strerror or error}") from error
    prompts = _prompts(options)
    cells = [LoadCell(name, load, texts) for name, texts in prompts.items() for load in options.loads]
    with contextlib.ExitStack() as stack:
        # Before the client's thread, whose niceness would not matter to them, but its event loop's file handles would.
        children = _start(options, stack, report)
        thread = stack.enter_context(ClientThread(options.nice))
        named = options.targets or tuple(NamedTarget(child.name, child.url) for child in children)
        clients = [_client(thread, one, options, stack) for one in named]
        targets = [_open(thread, *one, options, report) for one in zip(named, clients, strict=True)]
        by_target = {child.name: child for child in children}
        variants = _variants(targets, options, report)
        if not variants:
            raise CommandError("no mode is left that a server can run")
        owned = {v.name: by_target[v.target.name] for v in variants if v.target.name in by_target}
        run = Runner(thread, variants, cells, options.size, owned, report).run()
        how = [(target, _how(by_target.get(target.name))) for target in targets]
        return _conclude(run, options, how, _machine(options, thread.niced), report)


def _prompts(options: Options) -> dict[str, tuple[WorkloadPrompt, ...]]:
    if options.prompts is not None:
        return {OWN: read_prompts(options.prompts)}
    return {name: load_workload(name) for name in options.workloads}


def _start(options: Options, stack: contextlib.ExitStack, report: Report) -> list[Child]:
    if options.targets:
        return []
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="truedraft-bench-")))
    flags = list(options.serve_flags)
    named: list[tuple[str, Sequence[str]]] = [(STARTED, flags)]
    if options.block_sizes:
        given = {flag.partition("=")[0] for flag in flags}
        if "--block-size" in given:
            raise CommandError("--block-size and --block-sizes exclude each other")
        bounded = given & {"--kv-cache-memory", "--num-blocks"}
        memory = [] if bounded else ["--kv-cache-memory", SIZED_MEMORY]
        named = [(f"block {n}", [*flags, *memory, "--block-size", str(n)]) for n in options.block_sizes]
    for name, its_flags in named:
        report(f"starting {name}: serve {shlex.join(its_flags)}".rstrip())
    return stack.enter_context(start_servers(named, folder))


def _client(thread: ClientThread, named: NamedTarget, options: Options, stack: contextlib.ExitStack) -> Client:
    key = os.environ.get(options.api_key_env, "").strip() if options.api_key_env else ""
    client = Client(named.url, api_key=key, timeout=options.size.timeout)
    stack.callback(lambda: thread.run(client.close()))
    return client


def _open(thread: ClientThread, named: NamedTarget, client: Client, options: Options, report: Report) -> Target:
    target = thread.run(open_target(named.name, client, model=options.served_model, chat=options.size.chat))
    what = {"messages": [{"role": "user", "content": "Hello"}]} if options.size.chat else {"prompt": "Hello"}
    refused = thread.run(find_fields(target, what, optional_fields(options.size, 0, "bench-fields")))
    for name, reason in refused.items():
        report(f"{named.name}: does without {name}, which it refuses ({reason})")
    if "cache_salt" not in target.fields:
        report(f"{named.name}: repeated prompts may find its prefix cache warm, as it takes no cache_salt")
    return target


def _variants(targets: Sequence[Target], options: Options, report: Report) -> list[Variant]:
    """Every mode of every server of ours; one, as it is, of others."""
    variants = []
    for target in targets:
        modes = options.modes if target.ours else (Mode(SERVER),)
        if not target.ours and len(options.modes) > 1:
            report(f"{target.name}: not a Truedraft server, so it is measured as it is (--mode is not for it)")
        # Servers of ours with equal weights and kernels must agree with each other; of others each is on its own.
        group = f"truedraft {target.info.get('system_fingerprint') or target.model}" if target.ours else target.name
        for mode in modes:
            reason = target.may_not(mode)
            if reason is not None:
                report(f"{target.name}: mode {mode.name} left out: {reason}")
                continue
            sized = len(options.block_sizes) > 0
            alone = len(modes) == 1 and (sized or not target.ours)
            name = mode.name if len(targets) == 1 else target.name if alone else f"{target.name}, {mode.name}"
            size = int(target.name.removeprefix("block ")) if sized else None
            variants.append(Variant(name, target, mode, group, size))
    return variants


def _how(child: Child | None) -> str:
    return "" if child is None else shlex.join(["truedraft", "serve", *child.flags])


def _machine(options: Options, niced: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "client": f"a thread of its own, niced by {options.nice}" if niced else "a thread of its own, not niced",
    }
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        found["processor"] = next((line.partition(":")[2].strip() for line in lines if "model name" in line), None)
        found["load_average"] = [round(value, 2) for value in os.getloadavg()]
    return found


def _conclude(
    run: BenchRun,
    options: Options,
    targets: Sequence[tuple[Target, str]],
    machine: Mapping[str, Any],
    report: Report,
) -> int:
    date = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    objects = result_objects(run, options, date)
    whole = whole_report(run, objects, options, targets, date, machine)
    print("\n".join(summary(whole)), flush=True)
    missing = write_reports(options.folder, whole)
    for line in missing:
        report(f"error: {line}")
    if run.ended is not None:
        raise run.ended
    return 0 if whole["passed"] and not missing else 1


def summary(whole: Mapping[str, Any]) -> list[str]:
    """The table and what has to be said beside it."""
    equal, objects = whole["equivalence"], whole["results"]
    lines = []
    if objects:
        lines += [table(objects), "", *LEGEND, ""]
    lines += missing_lines(objects)
    lines.append(
        f"outputs: {equal['compared'] - equal['different']:,} of {equal['compared']:,} equal to the first of the same "
        "request" + ("" if equal["compared"] else ": nothing was compared")
    )
    lines += [f"DIFFERENT: {text}" for text in equal["differences"][:10]]
    if whole["refused"] or whole["failures"]:
        lines.append(f"requests refused (503, 429): {whole['refused']:,}; failed: {whole['failures']:,}")
    if whole["stopped"]:
        lines.append(f"stopped: {whole['stopped']}")
    return lines


def write_reports(folder: Path, whole: Mapping[str, Any]) -> list[str]:
    """report.json, report.html made of it alone, results.jsonl; a line for each that could not be written."""
    from bench.serving.html import render

    made: dict[str, Callable[[], str]] = {
        "report.json": lambda: json.dumps(whole, indent=1, ensure_ascii=True, allow_nan=False) + "\n",
        "results.jsonl": lambda: "".join(json.dumps(one, allow_nan=False) + "\n" for one in whole["results"]),
        "report.html": lambda: render(whole),
    }
    missing = []
    for name, make in made.items():
        try:
            write_atomically(folder / name, make())
            print(f"{name}: {folder / name}")
        except Exception as error:  # one that cannot be made must not cost the others
            why = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
            missing.append(f"cannot write {folder / name}: {' '.join(why.split())}")
    return missing
