"""``truedraft verify`` on the command line. Cheap to import: torch comes with the first line of ``run``."""

from __future__ import annotations

import argparse

from server.commands import CommandError, Report

HELP = "prove that speculation changes nothing: compare it with plain decoding, token by token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="default", help="as for serve --model (default: the default model)")


def run(arguments: argparse.Namespace, report: Report) -> int:
    raise CommandError("truedraft verify is being built")
