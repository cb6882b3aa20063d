"""The command line: ``truedraft serve``, ``fetch``, ``build-kernels``, ``top``, ``--version``, and bench/'s commands.

The latter come by entry points (server.commands), as server/ does not know bench/.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.children import end_all_children
from model.errors import ModelError
from model.source_error import ModelSourceError
from server.commands import Command, CommandError, find_commands
from server.ending import INTERRUPTED_CODE, TERMINATED_CODE, Ended, ended_by_signals
from server.setting_flags import choices_of, default_text, flag_name, is_switch
from server.settings import Settings, SettingsError, load_settings
from server.top import command as top
from server.version import VERSION

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.parts import Parts
    from server.service import Service

_EXIT_CODES = (
    "Exit codes: 0 when done, also when a signal ended a server that was ready; 1 for an error, which is one line on "
    "stderr, for a server that failed or was frozen, and for one that a second signal ended; "
    f"{TERMINATED_CODE} for SIGTERM and {INTERRUPTED_CODE} for SIGINT before the server was ready."
)


def report(line: str) -> None:
    """One line for whoever started the process, if they still read; the log proper goes its own way."""
    with contextlib.suppress(OSError, ValueError):  # the reader has gone, the disk is full, stderr is closed
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


def main(argv: Sequence[str] | None = None, serve_settings: Callable[[Settings], int] | None = None) -> int:
    """Returns the exit code; whatever the user can mend is one line on stderr and 1.

    ``serve_settings`` is what ``serve`` does with its settings; None: :func:`serve`.
    """
    others: dict[str, Command] = {"top": top, **find_commands()}
    arguments = vars(build_parser(others).parse_args(argv))
    name = arguments.pop("command")
    with ended_by_signals(report, end_all_children) as tell:
        try:
            if name in others:
                return others[name].run(argparse.Namespace(**arguments), report)
            return _run(name, arguments, serve if serve_settings is None else serve_settings)
        except (SettingsError, CommandError, ModelError, ModelSourceError) as error:
            report(f"error: {error}")
            return 1
        except Ended as ended:
            return tell(ended.number)


def _run(command: str, arguments: dict[str, Any], serve_settings: Callable[[Settings], int]) -> int:
    if command == "serve":
        return serve_settings(load_settings(arguments, arguments.pop("config")))
    if command == "fetch":
        return _fetch(arguments["model"])
    return _build_kernels()


def serve(settings: Settings, parts: Parts | None = None, build_app: Callable[[Service], ASGIApp] | None = None) -> int:
    """Serve until a signal or a failure; returns the exit code.

    ``parts`` and ``build_app`` are for whoever assembles a service or an application of their own.
    """
    from server.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    # Imported here: torch takes seconds, and --help or a bad flag should not.
    from server.app import create_app
    from server.assemble import StartError, build_service
    from server.parts import PLAIN
    from server.run import bind, run

    try:
        with bind(settings) as sock:  # before the model is loaded: a port in use is told at once
            service = build_service(settings, report, parts or PLAIN)
            return run(service, sock, report, build_app or create_app)
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
