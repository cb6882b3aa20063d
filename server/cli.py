"""The command line: ``truedraft serve``, ``fetch``, ``build-kernels``, ``--version``, and the commands of bench/.

The latter come by entry points (server.commands), as server/ does not know bench/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from model.children import end_all_children
from model.errors import ModelError
from model.source_error import ModelSourceError
from server.commands import Command, CommandError, find_commands
from server.ending import INTERRUPTED_CODE, TERMINATED_CODE, Ended, ended_by_signals
from server.settings import Settings, SettingsError, choices_of, default_text, flag_name, is_switch, load_settings
from server.version import VERSION

_EXIT_CODES = (
    "Exit codes: 0 when done, also when a signal ended a server that was ready; 1 for an error, which is one line on "
    f"stderr; {TERMINATED_CODE} for SIGTERM and {INTERRUPTED_CODE} for SIGINT before the server was ready."
)


def report(line: str) -> None:
    """One line for whoever started the process; the log proper goes its own way."""
    print(f"truedraft: {line}", file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        report(f"error: {message}")
        raise SystemExit(1)


def build_parser(others: Mapping[str, Command] | None = None) -> argparse.ArgumentParser:
    """``others``: commands by name beside the server's own."""
    parser = _Parser(
        prog="truedraft",
        description="A lossless speculative-decoding inference server.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"truedraft {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP. Flags win over TRUEDRAFT_* environment variables, these over --config.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="settings from a TOML or YAML file")
    for name, info in Settings.model_fields.items():
        text = f"{info.description} (default: {default_text(info)})".replace("%", "%%").replace("`", "")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if is_switch(info):
            options["action"] = argparse.BooleanOptionalAction
        else:
            choices = choices_of(info)
            options["metavar"] = "{" + ",".join(choices) + "}" if choices else name.rsplit("_", 1)[-1].upper()
        serve.add_argument(flag_name(name), **options)
    fetch = commands.add_parser("fetch", help="fetch and convert a model, so that a later start needs no network")
    fetch.add_argument("model", nargs="?", default="default", help="as for serve --model (default: the default model)")
    commands.add_parser("build-kernels", help="build the CPU kernels for this machine, so that a later start need not")
    for name, command in (others or {}).items():
        text = command.HELP.replace("%", "%%")
        command.add_arguments(commands.add_parser(name, help=text, description=text, allow_abbrev=False))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; whatever the user can mend is one line on stderr and 1."""
    others = find_commands()
    arguments = vars(build_parser(others).parse_args(argv))
    name = arguments.pop("command")
    with ended_by_signals(report, end_all_children) as tell:
        try:
            if name in others:
                return others[name].run(argparse.Namespace(**arguments), report)
            return _run(name, arguments)
        except (SettingsError, CommandError, ModelError, ModelSourceError) as error:
            report(f"error: {error}")
            return 1
        except Ended as ended:
            return tell(ended.number)


def _run(command: str, arguments: dict[str, Any]) -> int:
    if command == "serve":
        return _serve(load_settings(arguments, arguments.pop("config")))
    if command == "fetch":
        return _fetch(arguments["model"])
    return _build_kernels()


def _serve(settings: Settings) -> int:
    from server.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    # Imported here: torch takes seconds, and --help or a bad flag should not.
    from server.assemble import StartError, build_service
    from server.run import bind, run

    try:
        with bind(settings) as sock:  # before the model is loaded: a port in use is told at once
            return run(build_service(settings, report), sock, report)
    except StartError as error:
        report(f"error: {error}")
        return 1


def _fetch(model: str) -> int:
    from model.source import resolve_model

    print(resolve_model(model, report=report).path)
    return 0


def _build_kernels() -> int:
    from model.kernels.build import KernelBuildError, build_kernels

    try:
        print(build_kernels(progress=report))
    except KernelBuildError as error:
        report(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
