"""A stream is read as strictly as the contract has it."""

from __future__ import annotations

import pytest

from bench.soak.events import StreamFault, read_events

GOOD = b'data: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'


def test_a_stream_is_its_events() -> None:
    assert read_events(GOOD) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        GOOD[:-1],
        GOOD[:-14],
        GOOD + b'data: {"c": 3}\n\n',
        GOOD.replace(b"\n\n", b"\r\n\r\n"),
        b"data: [DONE]\n\n",
        b": ping\n\n" + GOOD,
        b'data: {"a":\n1}\n\ndata: [DONE]\n\n',
    ],
)
def test_what_breaks_the_contract_is_refused(raw: bytes) -> None:
    with pytest.raises(StreamFault):
        read_events(raw)
