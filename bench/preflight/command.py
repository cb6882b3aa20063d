"""``truedraft preflight`` on the command line. Cheap to import: torch comes with the first line of ``run``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from server.commands import CommandError, Report
from server.settings import load_settings

if TYPE_CHECKING:
    from bench.preflight.checklist import Line
    from bench.preflight.report import Findings
    from model.loader import LoadedModel
    from server.settings import Settings

HELP = "is this workload fit for speculation, and is the server ready to go live"
RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--traffic", type=Path, metavar="FILE", help="recorded requests, JSONL (docs/preflight.md)")
    source.add_argument("--url", metavar="SERVER", help="a live Truedraft server, e.g. http://127.0.0.1:8000")
    parser.add_argument("--model", help="as for serve --model; with --url, the model to verify here")
    parser.add_argument(
        "--verify",
        choices=("quick", "bounded", "none"),
        default=None,
        help="what to run of truedraft verify: the quick suite, some of its cases, nothing "
        "(default: quick; with --url and no --model: none)",
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="with --url: time between the scrapes (default: 10)"
    )
    parser.add_argument(
        "--probe",
        type=int,
        default=0,
        metavar="N",
        help="with --url: send N requests each way, speculation off and on (default: 0, send none)",
    )
    parser.add_argument("--samples", type=int, default=16, help="requests of the traffic that are run (default: 16)")
    parser.add_argument("--tokens", type=int, default=64, help="most output tokens of each (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of each timing (default: 5)")
    parser.add_argument("--no-serve", action="store_true", help="with --traffic: do not start a server to play it at")
    parser.add_argument("--rules", type=Path, metavar="PATH", help="Prometheus rules: a file, or a folder of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there, too")
    parser.add_argument(
        "server_flags", nargs="*", metavar="-- FLAGS", help="flags of serve, for the server and the model"
    )


def run(arguments: argparse.Namespace, report: Report) -> int:
    """0 if nothing says no, else 1."""
    _check(arguments)
    if arguments.rules is None and RULES.is_dir():
        arguments.rules = RULES
    elif arguments.rules is not None and not arguments.rules.exists():
        raise CommandError(f"--rules {arguments.rules} does not exist")
    findings = _recorded(arguments, report) if arguments.traffic is not None else _live(arguments, report)
    print(findings.as_text(), flush=True)
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(findings.as_json(), indent=2, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise CommandError(f"--json {arguments.json}: {error.strerror or error}") from error
    return 0 if findings.passed else 1


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("samples", 1), ("tokens", 2), ("rounds", 1), ("probe", 0)):
        value = getattr(arguments, name)
        if value < least:
            raise CommandError(f"--{name} must be at least {least}, got {value}")
    if not 0 <= arguments.seconds <= 86_400:
        raise CommandError(f"--seconds must be from 0 to 86400, got {arguments.seconds:g}")
    if arguments.url is not None and not arguments.url.startswith(("http://", "https://")):
        raise CommandError(f"--url must begin with http:// or https://, got {arguments.url!r}")
    if arguments.url is not None and arguments.server_flags and arguments.model is None:
        raise CommandError("flags of serve need --model: they are for the model that is verified here")


def _settings(arguments: argparse.Namespace) -> tuple[Settings, list[str]]:
    """How ``truedraft serve`` would be started, as settings and as flags."""
    from server.cli import build_parser

    flags = [*(["--model", arguments.model] if arguments.model is not None else []), *arguments.server_flags]
    given = vars(build_parser().parse_args(["serve", *flags]))
    given.pop("command")
    return load_settings(given, given.pop("config")), flags


def _recorded(arguments: argparse.Namespace, report: Report) -> Findings:
    from bench.preflight.equivalence import run_verify
    from bench.preflight.recorded import RecordedOptions, preflight_recorded

    settings, flags = _settings(arguments)
    suite = arguments.verify or "quick"
    options = RecordedOptions(
        traffic=arguments.traffic,
        samples=arguments.samples,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        serve=not arguments.no_serve,
        rules=arguments.rules,
    )

    def verify(loaded: LoadedModel, folder: Path) -> Line:
        return run_verify(suite, settings, loaded, folder, report)

    return preflight_recorded(options, settings, flags, verify, report)


def _live(arguments: argparse.Namespace, report: Report) -> Findings:
    from bench.preflight.checklist import Line
    from bench.preflight.equivalence import NAME, run_verify
    from bench.preflight.live import preflight_live
    from server.assemble import load

    if arguments.model is None and arguments.verify not in (None, "none"):
        raise CommandError("--verify needs --model here: the weights of a live server cannot be had over HTTP")

    def verify() -> Line:
        if arguments.model is None:
            return Line(NAME, "unknown", "verify was not run; name the server's model with --model to run it here")
        if arguments.verify == "none":
            return Line(NAME, "unknown", "verify was not run (--verify none)")
        settings, _ = _settings(arguments)
        loaded, folder = load(settings, report)
        return run_verify(arguments.verify or "quick", settings, loaded, folder, report)

    return preflight_live(
        arguments.url.rstrip("/"),
        seconds=arguments.seconds,
        probe=arguments.probe,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        rules=arguments.rules,
        verify=verify,
        report=report,
    )
