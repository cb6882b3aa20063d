"""``truedraft replay`` on the command line. Cheap to import: torch comes with the first line of ``run``."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.replay.record import read_record
from server.commands import CommandError, Report
from server.setting_flags import choices_of, flag_name
from server.settings import Settings, load_settings

HELP = "run a recorded request again and compare the ids (exit code 0: the same)"

# What decides how a request is understood and computed.
_AS_SERVE = (
    "model", "served_model_name", "dtype", "quantize", "device", "executor", "kernels", "num_threads", "max_model_len",
    "tool_call_parser", "num_speculative_tokens", "drafter", "draft_model", "exit_layers", "draft_length",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, help="a request with its answer, or an audit's record (docs/api.md)")
    parser.add_argument("--plain", action="store_true", help="without speculation")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the server's settings file (TOML or YAML)")
    for name in _AS_SERVE:
        parser.add_argument(
            flag_name(name),
            dest=name,
            default=argparse.SUPPRESS,
            choices=choices_of(Settings.model_fields[name]),
            metavar=None if choices_of(Settings.model_fields[name]) else name.rsplit("_", 1)[-1].upper(),
            help="as for serve",
        )


def run(arguments: argparse.Namespace, report: Report) -> int:
    """0 if every choice is the same, else 1. Raises CommandError, SettingsError or what loading a model raises."""
    record = read_record(arguments.record)
    flags = {name: value for name, value in vars(arguments).items() if name in _AS_SERVE}
    settings = load_settings({**flags, "audit_rate": 0.0, "engine_process": False}, arguments.config)
    from bench.replay.replay import replay
    from server.assemble import StartError, build_service

    try:
        service = build_service(settings, report)
    except StartError as error:
        raise CommandError(str(error)) from error
    same = replay(service, record, plain=arguments.plain, say=lambda line: print(line, flush=True))
    print("the same" if same else "NOT the same", flush=True)
    return 0 if same else 1
