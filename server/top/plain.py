"""The board as plain lines, ``name: value``, for scripts and for people without colours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from server.top.board import STAGES, Board, runs


def plain_lines(board: Board) -> Iterator[str]:
    """Raises ValueError for a board that has no state."""
    if board.state is None:
        raise ValueError("nothing is known of the server")
    server, now, acceptance = board.state["server"], board.state["now"], board.state["acceptance"]
    kv = now["kv"]
    yield f"model: {server['model']} ({server['level']}, {server['fingerprint']})"
    yield f"server: {server['version']}, up {server['uptime_s']:.0f} s, {server['unready'] or 'ready'}"
    yield f"running: {board.running} of {server['max_running']}"
    yield f"waiting: {board.waiting}"
    yield f"tokens per second: {now['tokens_per_s']:g}"
    yield f"acceptance length: {_number(now['acceptance_length'])}"
    yield f"expected speed-up: {_number(now['expected_speedup'])}"
    yield f"accepted by position: {_numbers(acceptance['by_position'])}"
    yield f"break-even by position: {_numbers(acceptance['break_even'])}"
    yield (
        f"KV blocks: {server['num_blocks']} of {server['block_size']} tokens: {kv['used']} used "
        f"({kv['shared']} shared), {kv['cached']} cached, {kv['free']} free; fragmentation {kv['fragmentation']:g}"
    )
    if board.block_map:
        yield f"KV block map: {' '.join(f'{count}{letter}' for letter, count in runs(board.block_map))}"
    if seconds := board.stage_seconds:
        yield f"step ms: {', '.join(f'{name} {1000 * seconds[name]:.2f}' for name in STAGES)}"
    for request in board.requests:
        yield (
            f"finished: {request['key']} {request['finish_reason']}, {request['prompt_tokens']} + "
            f"{request['output_tokens']} tokens, {request['e2e_s']:g} s, "
            f"acceptance length {_number(request['acceptance_length'])}"
        )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _numbers(values: Sequence[float] | None) -> str:
    return " ".join(f"{value:g}" for value in values) if values else "none"
