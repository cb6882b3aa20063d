"""The load test's own client: what it takes from a stream, and when."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_test.client import Client, ClientError
from load_test.record import Record
from load_test.sse import MAX_LINE_BYTES, EventReader, StreamError

from tests.deploy.scripted import CLOSE, FOR_EVER, plain_answer, scripted, stream_answer

DONE = b"data: [DONE]\n\n"


def record(sent: float = 0.0, intended: float | None = None) -> Record:
    return Record(kind="chat", intended=sent if intended is None else intended, sent=sent)


def chunk(text: str = "x", *, count: int | None = None, ids: list[int] | None = None, **more: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
    if ids is not None:
        choice["token_ids"] = ids
    usage = None if count is None else {"prompt_tokens": 5, "completion_tokens": count}
    return json.dumps({"choices": [choice], "usage": usage, **more}).encode()


def delta(**fields: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "delta": fields}]}).encode()


def usage_chunk(count: int, **more: object) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
    return json.dumps({"choices": [], "usage": usage, **more}).encode()


def taken(*events: tuple[float, bytes], sent: float = 0.0, intended: float | None = None) -> Record:
    made = record(sent, intended)
    for now, data in events:
        made.take(data, now)
    return made


# events


@given(st.data())
def test_events_are_the_same_wherever_the_bytes_are_cut(data: st.DataObject) -> None:
    body = (
        'data: {"text": "天"}\n\ndata: a\ndata: b\n\n: no event\n\nevent: x\r\ndata:c\r\n\r\ndata: [DONE]\n\n'.encode()
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    reader, events = EventReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        events += reader.feed(body[start:end])
    assert events == ['{"text": "天"}'.encode(), b"a\nb", b"c", b"[DONE]"]


def test_an_event_that_was_cut_off_is_never_given() -> None:
    assert EventReader().feed(b"data: a\n\ndata: b\n") == [b"a"]


def test_a_line_without_an_end_is_refused() -> None:
    with pytest.raises(StreamError, match="longer than"):
        EventReader().feed(b"x" * (MAX_LINE_BYTES + 1))


# one request


def test_a_chunk_of_several_tokens_is_one_gap_and_tpot_counts_its_tokens() -> None:
    made = taken((1.0, chunk(count=1)), (2.0, chunk(count=5)), (4.0, chunk(count=6)), (4.0, b"[DONE]"))
    assert (made.ttft, made.gaps, made.num_chunks) == (1.0, [1.0, 2.0], 3)
    assert made.tpot == pytest.approx(3.0 / 5)


def test_two_chunks_of_one_read_are_two_chunks() -> None:
    made = taken((1.0, chunk(ids=[4])), (1.0, chunk(ids=[5])), (3.0, chunk(ids=[6])))
    assert made.gaps == [0.0, 2.0]


def test_a_token_without_text_is_a_token() -> None:
    made = taken((1.0, chunk("", ids=[4])), (2.0, chunk("天", ids=[5, 6])))
    assert (made.num_tokens, made.ttft, made.gaps) == (3, 1.0, [1.0])


def test_tokens_are_those_of_the_usage_not_of_the_chunks() -> None:
    made = taken((1.0, chunk("one")), (2.0, chunk("two three")), (3.0, usage_chunk(7)), (3.0, b"[DONE]"))
    assert (made.num_tokens, made.num_chunks, made.num_prompt_tokens, made.num_cached_tokens) == (7, 2, 5, 2)
    assert made.tpot == pytest.approx(1.0 / 6)


def test_the_role_of_a_chat_is_no_token() -> None:
    made = taken((1.0, delta(role="assistant", content="")), (3.0, delta(content="a")), (4.0, delta()))
    assert (made.ttft, made.gaps, made.num_tokens) == (3.0, [], 1)


def test_the_role_counts_where_the_usage_says_that_tokens_came_with_it() -> None:
    first = {
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
        "usage": {"completion_tokens": 1},
    }
    second = {"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}
    made = taken((1.0, json.dumps(first).encode()), (1.0, json.dumps(second).encode()))
    assert (made.ttft, made.num_tokens, made.num_chunks) == (1.0, 1, 1)


def test_a_late_start_is_part_of_the_latencies() -> None:
    made = taken((6.0, chunk(count=1)), (8.0, b"[DONE]"), intended=2.0, sent=5.0)
    assert (made.late, made.ttft, made.e2e) == (3.0, 4.0, 6.0)


def test_acceptance_comes_from_the_numbers_of_the_request() -> None:
    speculation = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 6}
    made = taken((1.0, chunk(count=1)), (2.0, usage_chunk(11, metrics={"speculative_decoding": speculation})))
    assert (made.num_drafts, made.num_drafted, made.num_accepted) == (4, 12, 6)
    assert taken((2.0, usage_chunk(11, metrics={"speculative_decoding": None}))).num_drafts == 0


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([chunk(count=1), b'{"error": {"message": "m", "code": "timeout"}}', b"[DONE]"], "in the stream: timeout"),
        ([b"[DONE]"], "the stream ended without a token"),
        ([b"no json"], "a chunk that is none (JSONDecodeError)"),
        ([b"[1]"], "a chunk that is none (AttributeError)"),
        ([b'{"choices": [7]}'], "a chunk that is none (AttributeError)"),
    ],
)
def test_a_stream_that_says_something_else_has_failed(events: list[bytes], reason: str) -> None:
    made = taken(*((1.0, event) for event in events))
    made.end(2.0)
    assert (made.outcome, made.reason, made.e2e) == ("failed", reason, None)


def test_a_stream_without_its_end_has_failed() -> None:
    made = taken((1.0, chunk(count=1)))
    made.end(2.0)
    assert (made.outcome, made.reason) == ("failed", "the stream ended without [DONE]")
    assert made.ttft == 1.0


@pytest.mark.parametrize(
    ("status", "code", "outcome", "reason"),
    [
        (429, "rate_limit_exceeded", "shed", "429 rate_limit_exceeded"),
        (503, "overloaded", "shed", "503 overloaded"),
        (503, None, "shed", "503"),  # a proxy's
        (503, "engine_failed", "failed", "503 engine_failed"),
        (500, "server_error", "failed", "500 server_error"),
        (400, "context_length_exceeded", "failed", "400 context_length_exceeded"),
    ],
)
def test_what_is_refused_under_load_is_told_from_failures(
    status: int, code: str | None, outcome: str, reason: str
) -> None:
    made = record()
    body = b"<html>" if code is None else json.dumps({"error": {"message": "m", "code": code}}).encode()
    made.refuse(status, {"retry-after": "3", "retry-after-ms": "2500"}, body, 1.0)
    assert (made.outcome, made.reason) == (outcome, reason)
    assert made.retry_after == (2.5 if outcome == "shed" else 0.0)


# the client


def sent_by(client: Client, leave_after: int | None = None) -> Record:
    made = record(time.perf_counter())
    client.stream("/v1/completions", {"stream": True}, made, leave_after)
    return made


def test_a_whole_answer_is_completed_and_its_connection_used_again() -> None:
    answer = stream_answer(b"data: " + chunk(count=1) + b"\n\n", DONE)
    with scripted([answer, answer]) as server:
        client = Client(server.url)
        assert [sent_by(client).outcome for _ in range(2)] == ["completed", "completed"]
        client.close()
    assert server.num_connections == 1


def test_tokens_are_seen_before_the_answer_is_over() -> None:
    first, second = b"data: " + chunk(count=1) + b"\n\n", b"data: " + chunk(count=2) + b"\n\n"
    with scripted([stream_answer(first, FOR_EVER, second)]) as server:
        made = sent_by(Client(server.url), leave_after=1)
        assert (made.outcome, made.num_tokens) == ("cancelled", 1)
        assert server.saw_the_client_leave(10)


def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    answer = stream_answer(b"data: " + chunk(count=1) + b"\n\n", DONE)
    with scripted([answer, CLOSE], [answer]) as server:
        client = Client(server.url)
        assert [sent_by(client).outcome for _ in range(2)] == ["completed", "completed"]
        client.close()
    assert server.num_connections == 2


def test_a_new_connection_that_the_server_closes_has_failed() -> None:
    with scripted([[CLOSE]]) as server:
        made = sent_by(Client(server.url))
    assert (made.outcome, made.reason) == ("failed", "RemoteDisconnected")


def test_a_stream_cut_in_the_middle_has_failed() -> None:
    with scripted([stream_answer(b"data: " + chunk(count=1) + b"\n\n", CLOSE)]) as server:
        made = sent_by(Client(server.url))
    assert (made.outcome, made.reason, made.num_tokens) == ("failed", "IncompleteRead", 1)


def test_a_server_that_says_nothing_has_failed_after_the_timeout() -> None:
    with scripted([stream_answer(b"data: " + chunk(count=1) + b"\n\n", FOR_EVER)]) as server:
        made = sent_by(Client(server.url, timeout=0.2))
    assert (made.outcome, made.reason) == ("failed", "TimeoutError")


def test_a_refusal_is_read_to_its_end_so_that_the_connection_can_be_used_again() -> None:
    refusal = plain_answer(503, b'{"error": {"code": "overloaded"}}', ("Retry-After-Ms", "40"))
    with scripted([refusal, refusal]) as server:
        client = Client(server.url)
        made = [sent_by(client) for _ in range(2)]
        client.close()
    assert [(one.outcome, one.retry_after) for one in made] == [("shed", 0.04)] * 2
    assert server.num_connections == 1


def test_what_is_no_answer_is_one_clear_line() -> None:
    with scripted([plain_answer(401, b"{}"), plain_answer(200, b"no json")]) as server:
        client = Client(server.url)
        with pytest.raises(ClientError, match=r"^GET /v1/models answered 401$"):
            client.get("/v1/models")
        with pytest.raises(ClientError, match=r"^POST /tokenize answered no JSON$"):
            client.post("/tokenize", {})
        client.close()
    with pytest.raises(ClientError, match=r"^GET /metrics: ConnectionRefusedError"):
        Client(server.url).get("/metrics")


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://"])
def test_a_host_must_be_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="the host must be like"):
        Client(url)
