"""The soak of the suffix drafter, on a small scale; what it says of times is not tested."""

from __future__ import annotations

import pytest

from bench.suffix_soak import VOCAB, main, soak
from specdec.drafters.suffix import SuffixDrafter


def test_each_window_has_every_token_and_copies_are_found() -> None:
    drafter = SuffixDrafter(vocab_size=VOCAB, max_store_bytes=400_000, max_own_bytes=400_000)
    windows = list(soak(6000, 1500, 300, drafter=drafter))
    assert [window.total for window in windows] == [1500, 3000, 4500, 6000]
    assert all(len(window.propose_us) == len(window.update_us) == 500 for window in windows)
    assert all(0 < window.accepted < window.drafted for window in windows[1:])
    assert all(window.memory_bytes <= drafter.max_memory_bytes for window in windows)
    assert drafter.store.num_evicted > 0
    assert windows[-1].probe_us is None  # the probes had to make room


def test_probes_are_found_as_long_as_there_is_room() -> None:
    windows = list(soak(1200, 600, 300, drafter=SuffixDrafter(vocab_size=VOCAB)))
    assert all(window.probe_us and window.young_probe_us for window in windows)


def test_the_command_writes_a_line_for_each_window(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "1200", "--window", "600", "--request-tokens", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["600", "1,200"]
