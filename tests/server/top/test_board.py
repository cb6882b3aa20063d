"""What `truedraft top` makes of a state and a feed, without a server or a terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from server.top.board import Board, expanded, runs, shrunk
from server.top.draw import draw
from server.top.plain import plain_lines
from server.ui.blocks import run_lengths

REQUEST: dict[str, Any] = {
    "key": 7, "choice": 0, "n": 40, "t": 4.0, "finish_reason": "length", "prompt_tokens": 7, "cached_tokens": 4,
    "output_tokens": 5, "queue_s": 0.5, "ttft_s": 1.0, "tpot_s": None, "e2e_s": 3.5, "steps": 2, "drafted": 6,
    "accepted": 3, "acceptance_length": 2.5, "preemptions": 1,
}  # fmt: skip


def state(seq: int = 40, uptime: float = 100.0, **now: Any) -> dict[str, Any]:
    return {
        "server": {
            "model": "tiny", "fingerprint": "fp_1", "level": "L0", "version": "0.1.0", "uptime_s": uptime,
            "block_size": 16, "num_blocks": 8, "num_speculative_tokens": 4, "drafters": ["ngram"], "max_running": 8,
            "unready": None,
        },
        "now": {
            "running": 2, "waiting": 1, "kv": {"free": 4, "used": 3, "cached": 1, "shared": 1, "fragmentation": 0.25},
            "tokens_per_s": 80.5, "acceptance_length": 2.5, "expected_speedup": None, **now,
        },
        "acceptance": {"by_position": [0.8, 0.1], "break_even": [0.2, 0.2, 0.2, 0.2]},
        "recent": [REQUEST],
        "seq": seq,
    }  # fmt: skip


def step(n: int, t: float, *keys: int, verify: float = 0.02) -> dict[str, Any]:
    return {
        "n": n, "t": t, "s": {"draft": 0.001, "verify": verify}, "rows": 4,
        "seqs": [[key, 2, 3, 1, "ngram"] for key in keys], "running": len(keys), "waiting": 0, "kv": [4, 3, 1, 1, 0.25],
    }  # fmt: skip


def steps(*found: dict[str, Any], dropped: int = 0) -> tuple[str, dict[str, Any]]:
    return "steps", {"seq": found[-1]["n"], "dropped": dropped, "steps": list(found)}


def text_of(board: Board, problem: str | None = None, width: int = 120, height: int = 50) -> str:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(draw(board, "http://x", problem, width, height))
    return captured.get()


def known() -> Board:
    board = Board()
    board.take_state(state())
    board.take(*steps(step(41, 1.0, 1, 2), step(42, 1.5, 1), step(43, 1.6, 1, 2)))
    board.take("blocks", {"seq": 43, "num_blocks": 8, "rle": True, "map": "2us3.pc"})
    return board


def test_later_steps_say_who_runs_and_earlier_ones_do_not() -> None:
    board = Board()
    board.take_state(state(seq=40))
    board.take(*steps(step(39, 0.5, 1, 2, 3), step(40, 0.6, 1, 2, 3)))
    assert (board.running, board.waiting) == (2, 1)
    board.take(*steps(step(41, 0.7, 1)))
    assert (board.running, board.waiting) == (1, 0)


def test_the_itl_is_the_time_between_steps_of_one_choice() -> None:
    assert sorted(known().gaps) == pytest.approx([0.1, 0.5, 0.6])


def test_steps_that_were_not_seen_make_no_gap() -> None:
    board = Board()
    board.take_state(state())
    board.take(*steps(step(41, 1.0, 1)))
    board.take(*steps(step(99, 9.0, 1), dropped=57))
    assert list(board.gaps) == []
    assert board.dropped == 57


def test_steps_from_before_the_first_are_not_missed() -> None:
    board = Board()
    board.take_state(state())
    board.take(*steps(step(41, 1.0, 1), dropped=30))
    assert board.dropped == 0


def test_steps_while_the_feed_was_closed_make_no_gap_either() -> None:
    board = known()
    gaps = list(board.gaps)
    board.take(*steps(step(90, 60.0, 1)))  # of a feed that was opened again, from step 89 on
    assert list(board.gaps) == gaps
    assert board.dropped == 46


def test_a_step_that_is_told_again_when_the_feed_is_opened_again_counts_once() -> None:
    board = known()
    gaps = list(board.gaps)
    board.take(*steps(step(42, 1.5, 1), step(43, 1.6, 1, 2), step(44, 2.0, 1)))
    assert [each["n"] for each in board.steps] == [41, 42, 43, 44]
    assert list(board.gaps) == [*gaps, pytest.approx(0.4)]


def test_a_request_that_the_state_has_is_not_shown_twice() -> None:
    board = known()
    board.take("requests", {"requests": [REQUEST, {**REQUEST, "key": 8}]})
    assert [request["key"] for request in board.requests] == [8, 7]


def test_a_server_that_was_started_again_is_shown_from_its_own_beginning() -> None:
    board = known()
    board.take_state(state(seq=0, uptime=1.0, running=0))
    assert board.seq == 0
    assert not board.steps
    assert board.running == 0
    board.take(*steps(step(1, 0.1, 1)))
    assert [each["n"] for each in board.steps] == [1]


def test_states_that_overtake_each_other_are_no_new_start() -> None:
    board = known()
    board.take_state(state(seq=41, uptime=99.9))
    assert len(board.steps) == 3


@given(st.text("usc.p", max_size=200))
def test_run_lengths_come_back_as_they_were(block_map: str) -> None:
    assert expanded(run_lengths(block_map)) == block_map
    assert "".join(letter * count for letter, count in runs(block_map)) == block_map


@given(st.text("usc.p", min_size=1, max_size=200), st.integers(1, 50))
def test_a_map_is_shrunk_to_what_most_blocks_of_each_piece_are(block_map: str, size: int) -> None:
    shown = shrunk(block_map, size)
    assert len(shown) == min(len(block_map), size)
    assert set(shown) <= set(block_map)
    assert shrunk("uu" * size + ".." * size, 2 * size) == "u" * size + "." * size


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_everything_is_drawn_at_any_width(width: int) -> None:
    shown = text_of(known(), width=width)
    for word in ("tiny", "L0", "running", "waiting", "verify", "KV cache", "finished"):
        assert word in shown, word
    assert max(map(len, shown.splitlines())) <= width


def test_what_is_told_is_told_without_colours() -> None:
    shown = text_of(known())
    assert "80.5" in shown
    assert "0.80  pays (0.20)" in shown
    assert "0.10  costs (0.20)" in shown
    assert "uus...pc" in shown


def test_a_server_that_is_away_is_told_and_what_it_said_last_stays() -> None:
    shown = text_of(known(), problem="http://x does not answer (Connection refused)")
    assert "! http://x does not answer" in shown
    assert "uus...pc" in shown
    assert "connecting" in text_of(Board())


def test_a_server_that_takes_nothing_new_is_not_called_ready() -> None:
    board = known()
    assert "ready" in text_of(board)
    assert board.state is not None
    board.state["server"]["unready"] = "the server is shutting down"
    shown = text_of(board)
    assert "shutting down" in shown
    assert "ready" not in shown


def test_the_plain_lines_have_a_name_and_a_value_each() -> None:
    lines = dict(line.split(": ", 1) for line in plain_lines(known()))
    assert lines["running"] == "2 of 8"
    assert lines["tokens per second"] == "80.5"
    assert lines["accepted by position"] == "0.8 0.1"
    assert lines["KV block map"] == "2u 1s 3. 1p 1c"
    assert lines["step ms"].startswith("draft 1.00, build 0.00, verify 20.00")
    assert lines["finished"] == "7 length, 7 + 5 tokens, 3.5 s, acceptance length 2.5"
    json.dumps(lines)


def test_a_server_without_a_step_yet_is_drawn() -> None:
    board = Board()
    fresh = {**state(seq=0), "acceptance": {"by_position": [], "break_even": None}, "recent": []}
    board.take_state(fresh)
    assert "no drafts" in text_of(board)
    assert "accepted by position: none" in list(plain_lines(board))
