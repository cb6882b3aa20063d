"""Large answers have the bytes that they would have in one go, and hold nobody up on the way."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server import large_json
from server.large_json import THREAD_ABOVE_ENTRIES, dump_answer, large_event
from server.sse import data_event, dump_json
from tests.pauses import pauses

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=40
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_the_pieces_are_the_whole(value: dict[str, Any]) -> None:
    assert "".join(large_json._pieces(value, 0)).encode() == dump_json(value)


def answer(tokens: int) -> dict[str, Any]:
    """As prompt_logprobs make it."""
    alternatives = {str(i): {"logprob": -i / 7, "rank": i, "decoded_token": f"\u2028 {i}"} for i in range(20)}
    choice = {"index": 0, "text": "", "logprobs": None, "prompt_logprobs": [None, *[alternatives] * tokens]}
    return {"id": "cmpl-1", "choices": [choice], "usage": {"prompt_tokens": tokens + 1}}


def test_a_large_answer_has_the_same_bytes_whole_and_as_an_event() -> None:
    for tokens in (1, THREAD_ABOVE_ENTRIES - 2, THREAD_ABOVE_ENTRIES, THREAD_ABOVE_ENTRIES + 1):
        value = answer(tokens)
        assert asyncio.run(dump_answer(value)) == dump_json(value)
        assert asyncio.run(large_event(value)) == data_event(value)
        assert json.loads(dump_json(value)) == value


def test_the_loop_goes_on_while_a_large_answer_is_put_together() -> None:
    async def run() -> tuple[float, float]:
        return await pauses(asyncio.ensure_future(dump_answer(answer(5_000))))

    longest, duration = asyncio.run(run())
    assert longest < duration / 2
