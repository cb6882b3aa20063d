"""The board as panels for a terminal of any width. Nothing is told by colour alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from server.top.board import STAGES, Board, runs, shrunk

WIDE, MIDDLE = 96, 72  # columns: three panels beside each other, or two; below, one
LOW = 40  # lines: below it the block map is small
MAP_ROWS, FEW_MAP_ROWS = 6, 2
FEWEST_REQUESTS = 3
_AROUND_REQUESTS = 4  # lines of their panel that are no requests
_LETTERS = {
    ".": ("bright_black", "free"),
    "u": ("blue", "used"),
    "s": ("magenta", "shared"),
    "p": ("yellow", "partly filled"),
    "c": ("green", "cached"),
}
_STAGE_STYLES = ("cyan", "bright_black", "blue", "green", "bright_black", "bright_black", "yellow")


def draw(board: Board, url: str, problem: str | None, width: int, height: int) -> RenderableType:
    """``problem``: why the server is not heard of now; what is shown is then what it said last."""
    top = _headline(board, url, problem)
    if board.state is None:
        return Group(top)
    map_rows = MAP_ROWS if height >= LOW else FEW_MAP_ROWS
    kv = _kv(board, width - 4, map_rows)
    if width < MIDDLE:
        return Group(top, _now(board), _acceptance(board), _stages(board), kv, _requests(board, FEWEST_REQUESTS, False))
    if width < WIDE:
        parts: list[RenderableType] = [_beside(_now(board), _acceptance(board)), _stage_line(board)]
    else:
        parts = [_beside(_now(board), _stages(board), _acceptance(board))]
    used = 1 + 2 + len(STAGES) + (width < WIDE) + 2 + 1 + map_rows
    count = max(FEWEST_REQUESTS, height - used - _AROUND_REQUESTS)
    return Group(top, *parts, kv, _requests(board, count, width >= WIDE))


def _beside(*panels: Panel) -> Table:
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _stage_line(board: Board) -> Text:
    seconds = board.stage_seconds
    each = "  ".join(f"{name} {1000 * seconds.get(name, 0.0):.2f}" for name in STAGES)
    return Text(f" step {1000 * sum(seconds.values()):.1f} ms: {each}", no_wrap=True, overflow="ellipsis")


def _headline(board: Board, url: str, problem: str | None) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("truedraft ", "bold")
    unready = problem or (None if board.state is None else board.state["server"]["unready"])
    if unready is not None:
        text.append(f"! {unready}  ", "bold red")
    else:
        text.append("connecting  " if board.state is None else "ready  ", "green")
    if board.state is not None:
        server = board.state["server"]
        text.append(f"{server['model']}  {server['level']}  {server['version']}  up {_duration(server['uptime_s'])}  ")
    text.append(url, "bright_black")
    return text


def _now(board: Board) -> Panel:
    assert board.state is not None
    server, now = board.state["server"], board.state["now"]
    table = _pairs()
    table.add_row(
        "running",
        _bar(board.running, server["max_running"], 10, "blue") + f" {board.running} of {server['max_running']}",
    )
    table.add_row("waiting", Text(str(board.waiting), "bold yellow" if board.waiting else ""))
    table.add_row("tokens/s", f"{now['tokens_per_s']:.1f}")
    table.add_row("acceptance length", _or_none(now["acceptance_length"]))
    table.add_row("expected speed-up", _or_none(now["expected_speedup"]))
    itl = board.itl
    table.add_row("ITL ms, p50 p95", "none" if itl is None else f"{1000 * itl[0]:.1f}  {1000 * itl[1]:.1f}")
    if board.dropped:
        table.add_row("steps not seen", str(board.dropped))
    return Panel(table, title="now", title_align="left")


def _stages(board: Board) -> Panel:
    seconds = board.stage_seconds
    table = _pairs()
    whole = sum(seconds.values())
    for name, style in zip(STAGES, _STAGE_STYLES, strict=True):
        each = seconds.get(name, 0.0)
        table.add_row(name, _bar(each, whole, 12, style) + f" {1000 * each:7.2f}")
    return Panel(table, title=f"step, {1000 * whole:.1f} ms on average", title_align="left")


def _acceptance(board: Board) -> Panel:
    assert board.state is not None
    shares: Sequence[float] = board.state["acceptance"]["by_position"]
    lines: Sequence[float] | None = board.state["acceptance"]["break_even"]
    table = _pairs()
    for i, share in enumerate(shares[: _num_positions(board)]):
        line = lines[i] if lines is not None and i < len(lines) else None
        pays = line is None or share >= line
        bar = _bar(share, 1.0, 12, "green" if pays else "yellow", mark=line)
        told = "" if line is None else f"  {'pays' if pays else 'costs'} ({line:.2f})"
        table.add_row(str(i + 1), bar + f" {share:.2f}{told}")
    if not shares:
        table.add_row("", "no drafts")
    return Panel(table, title="accepted up to position (pays from)", title_align="left")


def _kv(board: Board, width: int, rows: int) -> Panel:
    assert board.state is not None
    server, kv = board.state["server"], board.state["now"]["kv"]
    legend = Text(no_wrap=True, overflow="ellipsis")
    for letter, (style, name) in _LETTERS.items():
        legend.append(letter, style).append(f" {name}  ")
    shown = Text()
    for letter, count in runs(shrunk(board.block_map, max(1, width) * rows)):
        shown.append(letter * count, _LETTERS[letter][0] if letter in _LETTERS else "")
    title = (
        f"KV cache: {server['num_blocks']} blocks, {kv['used']} used ({kv['shared']} shared), {kv['cached']} cached, "
        f"{kv['free']} free, fragmentation {kv['fragmentation']:.2f}"
    )
    return Panel(Group(legend, shown), title=title, title_align="left")


def _requests(board: Board, count: int, whole: bool) -> Panel:
    """``whole``: with the columns that need a wide terminal."""
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("request", lambda request: f"{request['key']}"),
        ("ended", lambda request: str(request["finish_reason"])),
        ("prompt", lambda request: f"{request['prompt_tokens']}"),
        ("output", lambda request: f"{request['output_tokens']}"),
        ("TTFT ms", lambda request: _ms(request["ttft_s"])),
        ("TPOT ms", lambda request: _ms(request["tpot_s"])),
        ("length", lambda request: _or_none(request["acceptance_length"])),
    ]
    if whole:
        columns += [
            ("cached", lambda request: f"{request['cached_tokens']}"),
            ("queue ms", lambda request: _ms(request["queue_s"])),
            ("all s", lambda request: f"{request['e2e_s']:.2f}"),
            ("preempted", lambda request: f"{request['preemptions']}"),
        ]
    table = Table(box=None, expand=True, pad_edge=False)
    for i, (head, _) in enumerate(columns):
        table.add_column(head, justify="left" if i < 2 else "right", no_wrap=True)
    for request in list(board.requests)[:count]:
        table.add_row(*(cell(request) for _, cell in columns))
    return Panel(table, title="finished, newest first; length: of acceptance", title_align="left")


def _num_positions(board: Board) -> int:
    return 0 if board.state is None else min(len(STAGES), len(board.state["acceptance"]["by_position"]))


def _pairs() -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bright_black", no_wrap=True)
    table.add_column(no_wrap=True)
    return table


def _bar(value: float, most: float, size: int, style: str, mark: float | None = None) -> Text:
    """``mark``: where the break-even line crosses it, as a share of ``most``."""
    full = 0 if most <= 0 else min(size, round(size * value / most))
    cells = ["█"] * full + ["░"] * (size - full)
    if mark is not None and 0.0 <= mark <= 1.0:
        cells[min(size - 1, int(size * mark))] = "|"
    text = Text()
    for i, cell in enumerate(cells):
        text.append(cell, "bold" if cell == "|" else style if i < full else "bright_black")
    return text


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _or_none(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02}:{minute:02}" if days else f"{hour}:{minute:02}:{second:02}"
