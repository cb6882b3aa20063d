"""``truedraft top``: see docs/ui.md."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

from server.commands import CommandError, Report
from server.ending import Ended
from server.top.board import STEPS_BEFORE, Board
from server.top.client import ServerAway, UiClient
from server.top.plain import plain_lines

HELP = "show what a running server does now: queue, batch, steps, acceptance, KV blocks"
KEY_VARIABLE = "TRUEDRAFT_API_KEY"
DRAW_SECONDS = 0.25
_MOST_EVENTS = 20  # of the feed's beginning, in which a block map should be


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--api-key-env",
        default=KEY_VARIABLE,
        metavar="NAME",
        help=f"environment variable that holds an API key of the server (default: {KEY_VARIABLE})",
    )
    parser.add_argument("--once", action="store_true", help="print the state as plain text and end")


def run(arguments: argparse.Namespace, report: Report) -> int:
    """Returns the exit code. Raises CommandError."""
    client = UiClient(arguments.url, _key(arguments.api_key_env))
    if arguments.once:
        print("\n".join(plain_lines(look_once(client))))
        return 0
    if not sys.stdout.isatty():
        raise CommandError("standard output is no terminal; use --once for plain text")
    try:
        watch(client)
    except Ended as ended:
        if ended.number != signal.SIGINT:
            raise
    return 0


def look_once(client: UiClient) -> Board:
    """A board with the state, the newest steps and the block map of this moment. Raises CommandError."""
    board = Board()
    try:
        board.take_state(client.state())
        for i, (name, data) in enumerate(client.events(max(0, board.seq - STEPS_BEFORE))):
            board.take(name, data)
            if board.block_map or i == _MOST_EVENTS:
                break
    except ServerAway as away:
        raise CommandError(str(away)) from None
    return board


def watch(client: UiClient) -> None:
    """Draw until somebody presses q. Raises CommandError if the server will not answer."""
    # Imported here: --help of any command should not wait for them.
    from rich.console import Console
    from rich.live import Live

    from server.top.draw import draw
    from server.top.watching import Watching

    console = Console()
    watching = Watching(client)
    try:
        with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                watching.update()
                width, height = console.size
                live.update(draw(watching.board, client.url, watching.problem, width, height), refresh=True)
                if _key_pressed(DRAW_SECONDS) in ("q", "Q"):
                    return
    finally:
        watching.stop()


def _key(variable: str) -> str | None:
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable():
        raise CommandError(f"the variable {variable} holds no API key: keys are of printable ASCII characters")
    return key or None


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """A key counts without Enter, and is not shown; Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key_pressed(timeout: float) -> str:
    """Within ``timeout`` seconds; empty if none is."""
    if not sys.stdin.isatty():
        time.sleep(timeout)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], timeout)
    return os.read(sys.stdin.fileno(), 1).decode("latin-1") if ready else ""
