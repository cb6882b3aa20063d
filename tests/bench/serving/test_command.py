"""The command line of ``truedraft bench``: what it takes, and one line for what it does not."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.serving import command
from bench.serving.options import AUTO, OFF, Load, Mode
from bench.serving.servers import start_servers
from bench.serving.workloads import WORKLOADS
from server.commands import CommandError, find_commands


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "fast"], "--mode must be off, auto, k4 or k4:ngram"),
        (["--mode", "k0"], "--mode must be off, auto, k4 or k4:ngram"),
        (["--mode", "off", "off"], "--mode names off twice"),
        (["--slo", "ttft"], "--slo must be one of ttft, tpot, itl, e2el"),
        (["--slo", "ttft:nan"], "got 'ttft:nan'"),
        (["--slo", "speed:3"], "got 'speed:3'"),
        (["--target", "localhost:8000"], "--target must be a URL"),
        (["--target", "http://a", "--target", "http://a"], "--target names a twice"),
        (["--target", "http://a", "--block-sizes", "1"], "--block-sizes and --target exclude each other"),
        (["--target", "http://a", "--", "--num-blocks", "4"], "flags of serve and --target exclude each other"),
        (["--target", "http://a", "--model", "m"], "--model and --target exclude each other"),
        (["--block-sizes", "16,x"], "--block-sizes must be positive numbers"),
        (["--block-sizes", "0"], "--block-sizes must be positive numbers"),
        (["--rounds", "0"], "--rounds must be from 1 to 1,000, got 0"),
        (["--tokens", "1"], "--tokens must be from 2"),
        (["--concurrency", "0"], "--concurrency must be from 1"),
        (["--concurrency", "2", "16", "--requests", "8"], "--requests 8 cannot fill --concurrency 16"),
        (["--rate", "nan"], "--rate must be from 0.001"),
        (["--temperature", "3"], "--temperature must be from 0 to 2, got 3"),
        (["--prompts", "f", "--workload", "chat"], "--prompts and --workload exclude each other"),
        (["--", "--model", "m"], "--model belongs in front of --"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(words: list[str], message: str) -> None:
    with pytest.raises(CommandError) as caught:
        command.read_options(parsed(*words))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_defaults_compare_off_a_fixed_length_and_the_controller() -> None:
    options = command.read_options(parsed())
    assert options.modes == (Mode(OFF, 0), Mode("k4", 4), Mode(AUTO))
    assert options.loads == (Load(seats=1), Load(seats=8))
    assert options.workloads == ("mixed",)


def test_closed_and_open_loops_stand_side_by_side() -> None:
    options = command.read_options(parsed("--concurrency", "4", "1", "4", "--rate", "2.5"))
    assert options.loads == (Load(seats=1), Load(seats=4), Load(rate=2.5))
    assert [options.size.requests_of(load) for load in options.loads] == [8, 8, 50]


def test_block_sizes_have_defaults_of_their_own() -> None:
    options = command.read_options(parsed("--block-sizes", "1,16,1"))
    assert (options.block_sizes, options.workloads) == ((1, 16), ("shared",))
    assert [mode.name for mode in options.modes] == ["auto"]


def test_a_target_may_have_a_name_and_v1_at_its_end() -> None:
    (target,) = command.read_options(parsed("--target", "peer=http://h:1/v1/")).targets
    assert (target.name, target.url) == ("peer", "http://h:1")


def test_the_workloads_of_the_flag_are_those_there_are() -> None:
    assert command.WORKLOAD_NAMES == WORKLOADS


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    reason = r"the server x did not get ready: .*--no-such-flag"
    with pytest.raises(CommandError, match=reason) as caught, start_servers([("x", ["--no-such-flag"])], tmp_path):
        raise AssertionError("it started")
    assert "\n" not in str(caught.value)


def test_the_command_is_found_where_the_project_is_installed() -> None:
    assert find_commands()["bench"].HELP == command.HELP
