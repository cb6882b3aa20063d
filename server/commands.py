"""Commands of other rooms on the ``truedraft`` command line: server/ calls them without importing them.

A package offers commands by entry points of the group ``truedraft.commands`` in pyproject.toml::

    [project.entry-points."truedraft.commands"]
    verify = "bench.verify.command"

Each names a module with the members of :class:`Command`. It is imported for ``--help`` too, so it must be cheap:
argparse and the like, torch only inside ``run``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

GROUP = "truedraft.commands"

Report = Callable[[str], None]


class CommandError(Exception):
    """A command cannot go on; the message is one line."""


class Command(Protocol):
    """What an entry point of the group names (a module will do)."""

    HELP: str  # one line for ``truedraft --help``

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's flags."""

    def run(self, arguments: argparse.Namespace, report: Report) -> int:
        """Returns the exit code. ``report`` takes one line for whoever started the process.

        Raises CommandError, model.errors.ModelError or model.source_error.ModelSourceError with one line for whatever
        the user can mend. SIGTERM and SIGINT arrive as server.ending.Ended, unless the command takes them itself.
        """


class _Broken:
    """Stands for a command whose module cannot be imported, so that the others can still be used."""

    def __init__(self, entry: EntryPoint, error: Exception) -> None:
        self._reason = f"{entry.value} cannot be loaded: {type(error).__name__}: {error}"
        self.HELP = self._reason

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # nobody knows its flags: they are words like any other
        parser.add_argument("ignored", nargs="*", help=argparse.SUPPRESS)

    def run(self, arguments: argparse.Namespace, report: Report) -> int:
        raise CommandError(" ".join(self._reason.split()))


def find_commands() -> dict[str, Command]:
    """The installed commands by name; empty if the project is not installed."""
    commands: dict[str, Command] = {}
    for entry in sorted(entry_points(group=GROUP)):
        try:
            commands[entry.name] = entry.load()
        except Exception as error:  # whatever another room's import raises
            commands[entry.name] = _Broken(entry, error)
    return commands
